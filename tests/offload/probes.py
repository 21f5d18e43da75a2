"""Functions that run inside an engine process and look at, or disturb, its tiers."""

from __future__ import annotations

import random
import time
from typing import Any

_stock: dict[str, Any] = {}


def _tiers(worker: Any) -> Any:
    return worker.scheduler.connector.tiers


def settle(worker: Any, seconds: float = 20.0) -> None:
    """Step until no job is left, and wait until files are written.

    Raises:
        AssertionError: Something never ends.
    """
    end = time.monotonic() + seconds
    tiers = _tiers(worker)
    worker.drain()
    while worker.scheduler.has_requests() or tiers._manager.has_pending_work():
        assert time.monotonic() < end, "jobs of the tiers never end"
        worker.engine.step()
        tiers.build_metadata()
        time.sleep(0.001)


def forget(worker: Any, cpu: bool) -> None:
    """Empty the KV cache, and CPU memory if asked to; what is in files stays."""
    settle(worker)
    assert worker.engine.reset_prefix_cache(reset_connector=cpu), "something is still in use"


def evict_rows(worker: Any, share: float, seed: int) -> int:
    """Evict a random share of the blocks in CPU memory; how many."""
    settle(worker)
    primary = _tiers(worker)._manager.primary_tier
    keys = sorted(primary._policy.chunks)
    chosen = random.Random(seed).sample(keys, round(share * len(keys)))
    for key in chosen:
        chunk = primary._policy.get(key)
        assert chunk.ref_cnt == 0
        primary._policy.remove(key)
        primary._num_evictable_cache_chunks -= 1
        primary._free_chunk(chunk)
    return len(chosen)


def counters(worker: Any) -> dict[str, float]:
    """Every ``vllm_spans`` sample with its label value, as ``name/label value``."""
    from prometheus_client import REGISTRY

    from vllm_spans.metrics.counters import ENGINE_LABELS, EngineMetrics

    settle(worker)
    # What was counted after the last step goes out with the next one.
    model_name = worker.scheduler.vllm_config.model_config.served_model_name
    EngineMetrics(model_name, 0).add(worker.scheduler._span_stats.take() or {})
    return {
        "/".join(
            [sample.name, *(v for k, v in sample.labels.items() if k not in ENGINE_LABELS)]
        ): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm_spans") and sample.name.endswith("_total")
    }


def in_use(worker: Any) -> dict[str, int]:
    """Sizes of what must be empty at idle."""
    settle(worker)
    tiers = _tiers(worker)
    manager = tiers._manager
    primary = manager.primary_tier
    files = tiers.file_tier
    return {
        "requests": len(tiers._requests),
        "loads": len(tiers._loads),
        "stores": len(tiers._stores),
        "loading": len(tiers._loading),
        "ended": len(tiers._ended),
        "published": len(tiers._published),
        "asking": len(worker.scheduler._asking),
        "manager": len(manager._req_state),
        "jobs": len(manager._jobs),
        "pinned": primary._num_allocated_chunks
        - len(primary._free_list)
        - primary._num_evictable_cache_chunks,
        "file loads": len(files._loads) if files else 0,
        "lookups": len(files._lookups._lookup_state) if files else 0,
    }


def descriptors(worker: Any) -> int:
    """Open file descriptors of the process."""
    import os

    return len(os.listdir("/proc/self/fd"))


def fail_copies(worker: Any) -> None:
    """Let every copy into the KV cache fail half way."""
    from vllm_spans.offload import host_copy

    _stock["copy_rows"] = host_copy.copy_rows

    def copy_rows(source: Any, source_rows: Any, target: Any, target_rows: Any) -> None:
        target.index_fill_(0, target_rows, 77)
        raise RuntimeError("injected: the copy fails")

    host_copy.copy_rows = copy_rows


def restore_copies(worker: Any) -> None:
    """Undo ``fail_copies`` and ``slow_copies``."""
    from vllm_spans.offload import host_copy

    host_copy.copy_rows = _stock.pop("copy_rows")


def slow_copies(worker: Any, seconds: float) -> None:
    """Let every load take a while, so that a test can get in between; stores are as fast as ever."""
    import threading

    from vllm_spans.offload import host_copy

    stock = _stock["copy_rows"] = host_copy.copy_rows

    def copy_rows(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        stock(*args)

    host_copy.copy_rows = copy_rows


def keep_rotated_pages(worker: Any) -> None:
    """Switch off: rotated pages of blocks that were loaded are dropped."""
    from vllm_spans.attention import outside_writes

    _stock["announce"] = outside_writes.announce
    outside_writes.announce = lambda blocks: None


def drop_rotated_pages(worker: Any) -> None:
    """Undo ``keep_rotated_pages``."""
    from vllm_spans.attention import outside_writes

    outside_writes.announce = _stock.pop("announce")


def gaps(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What the connector says of a request that waits for nothing but the tiers.

    Returns:
        ``gaps`` from the start and from the first block on, ``held``: per block whether a tier has it.
    """
    settle(worker)
    scheduler = worker.scheduler
    worker.add({**request, "id": "probe"})
    (waiting,) = list(scheduler.waiting)
    tiers, connector = _tiers(worker), scheduler.connector
    last = (waiting.num_tokens - 1) // scheduler.block_size
    end = time.monotonic() + 20
    while not tiers.resolve(waiting.request_id, waiting.block_hashes[:last]):
        tiers.build_metadata()
        assert time.monotonic() < end
    answer = {
        "gaps": connector.get_computed_token_gaps(waiting, 0),
        "later": connector.get_computed_token_gaps(waiting, scheduler.block_size),
        "held": [tiers.holds(waiting.request_id, key) for key in waiting.block_hashes[:last]],
        "tokens": waiting.num_tokens,
    }
    worker.engine.abort_request(["probe"])
    settle(worker)
    return answer


def keys_of(worker: Any, request: dict[str, Any]) -> list[str]:
    """Keys of a request's full blocks in hex."""
    worker.add({**request, "id": "keys"})
    (waiting,) = list(worker.scheduler.waiting)
    keys = [bytes(key).hex() for key in waiting.block_hashes]
    worker.engine.abort_request(["keys"])
    settle(worker)
    return keys


def overtake(worker: Any, slow: dict[str, Any], quick: dict[str, Any]) -> dict[str, Any]:
    """Run a request whose KV is slow to come, and one that arrives two steps later.

    Returns:
        ``order`` in which they ended, and their ``results``.
    """
    results: dict[str, Any] = {r["id"]: {"outputs": []} for r in (slow, quick)}
    order: list[str] = []
    worker.add(slow)
    for step in range(100_000):
        if step == 2:
            worker.add(quick)
        worker.collect(results)
        order += [name for name in results if results[name]["outputs"] and name not in order]
        if step > 2 and not worker.engine.has_unfinished_requests():
            return {"order": order, "results": results}
    raise RuntimeError(f"no end: {order}")


def step_counts(worker: Any) -> tuple[int, int]:
    """Steps that vLLM's fence counts as planned and as ended."""
    settle(worker)
    return worker.scheduler.sched_step_seq, worker.scheduler.processed_step_seq


def lose(worker: Any, keys: list[str]) -> None:
    """Remove blocks from CPU memory and from files."""
    settle(worker)
    tiers = _tiers(worker)
    primary = tiers._manager.primary_tier
    for text in keys:
        key = bytes.fromhex(text) + bytes(4)
        chunk = primary._policy.get(key)
        if chunk is not None:
            primary._policy.remove(key)
            primary._num_evictable_cache_chunks -= 1
            primary._free_chunk(chunk)
        if tiers.file_tier is not None:
            tiers.file_tier.store.path(key).unlink(missing_ok=True)


def resident_bytes(worker: Any) -> int:
    """Main memory that the process holds, shared memory left out."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["RssAnon"].split()[0]) * 1024


def be_patient(worker: Any) -> None:
    """Let requests wait for files again, as they do some time after files were slow."""
    import math

    _tiers(worker)._impatient_until = -math.inf


def late_stores(worker: Any, seconds: float) -> None:
    """Let a store go on while later steps run, as on a GPU, where it has a stream of its own."""
    from vllm_spans.offload.host_copy import HostCopyWorker

    stock = HostCopyWorker.submit_store

    def submit_store(self: Any, *args: Any) -> bool:
        def work() -> None:
            time.sleep(seconds)
            stock(self, *args)

        self._thread.submit(work)
        return True

    HostCopyWorker.submit_store = submit_store
