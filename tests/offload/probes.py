"""Functions that run inside an engine process and look at, or disturb, its tiers."""

from __future__ import annotations

import random
import time
from typing import Any

_stock: dict[str, Any] = {}
_loaded: dict[str, int] = {}


def _tiers(worker: Any) -> Any:
    return getattr(worker.scheduler, "_tiers", None)


def settle(worker: Any, seconds: float = 20.0) -> None:
    """Step until no job is left, and wait until files are written.

    Raises:
        AssertionError: Something never ends.
    """
    end = time.monotonic() + seconds
    tiers = _tiers(worker)
    worker.drain()
    while worker.scheduler.has_requests() or (tiers and tiers._manager.has_pending_work()):
        assert time.monotonic() < end, "jobs of the tiers never end"
        worker.engine.step()
        if tiers:
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
        "requests": len(tiers.lookups._requests),
        "prefetch": len(tiers.lookups._prefetch._requests),
        "loads": len(tiers._loads),
        "stores": len(tiers._stores),
        "loading": len(tiers.lookups.loading),
        "ended": len(tiers._ended),
        "reports": len(tiers._reports),
        "published": len(tiers._published),
        "asking": len(worker.scheduler._asking.waiting),
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


def _copiers(worker: Any) -> dict[str, Any]:
    """By connector what copies for it in the worker, which lives in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    parts = {type(part).__name__: part for part in getattr(group, "sub_connectors", [group])}
    return {
        name: getattr(part, "connector_worker", None) or part.worker for name, part in parts.items()
    }


def watch_loads(worker: Any) -> None:
    """Count from now on how many blocks each connector loads."""
    _loaded.clear()
    for name, side in _copiers(worker).items():
        copier = side.worker
        stock = _stock.setdefault(f"load {name}", copier.submit_load)

        def submit_load(
            job_id: int, source: Any, target: Any, name: str = name, stock: Any = stock
        ) -> bool:
            _loaded[name] = _loaded.get(name, 0) + len(target.block_ids)
            return bool(stock(job_id, source, target))

        copier.submit_load = submit_load


def loaded(worker: Any) -> dict[str, int]:
    """Blocks loaded since ``watch_loads``, by connector."""
    settle(worker)
    return dict(_loaded)


def left_in_connectors(worker: Any) -> dict[str, int]:
    """Sizes of what vLLM's own offloading connector must not hold at idle."""
    settle(worker)
    return {
        name: len(getattr(part.scheduler, name))
        for part in worker.scheduler._prefix_connectors._connectors
        for name in ("_req_status", "_jobs", "_block_id_to_pending_jobs")
    }


def known_blocks(worker: Any, request: dict[str, Any]) -> dict[str, list[int]]:
    """How many blocks of a request each of vLLM's own connectors knows, in its life.

    Returns:
        Per connector: while the request runs, after it was preempted, and when it runs again.
    """
    scheduler = worker.scheduler
    parts = scheduler._prefix_connectors._connectors
    counts: dict[str, list[int]] = {type(part).__name__: [] for part in parts}

    def note() -> None:
        for part in parts:
            (state,) = part.scheduler._req_status.values()
            counts[type(part).__name__].append(len(state.group_states[0].block_ids))

    worker.add({**request, "id": "known"})
    for do in (None, "preempt"):
        if do:
            assert worker.event({"do": do}) == 1
            note()
        # A reset is refused while something is being stored.
        while not scheduler.running or scheduler.connector.has_pending_push_work():
            worker.engine.step()
        note()
    worker.engine.abort_request(["known"])
    settle(worker)
    return counts


def hide_taken_blocks(worker: Any) -> None:
    """Switch off: connectors that know prefixes only are told of blocks with new owners."""
    connectors = worker.scheduler._prefix_connectors
    _stock["announce_taken"] = connectors.announce_taken
    connectors.announce_taken = lambda: None


def show_taken_blocks(worker: Any) -> None:
    """Undo ``hide_taken_blocks``."""
    worker.scheduler._prefix_connectors.announce_taken = _stock.pop("announce_taken")


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
    tiers, connector = _tiers(worker), scheduler._gaps_connector
    lookups = tiers.lookups
    last = (waiting.num_tokens - 1) // scheduler.block_size
    end = time.monotonic() + 20
    while not lookups.resolve(waiting.request_id, [waiting.block_hashes[:last]]):
        tiers.build_metadata()
        assert time.monotonic() < end
    answer = {
        "gaps": connector.get_computed_token_gaps(waiting, 0),
        "later": connector.get_computed_token_gaps(waiting, scheduler.block_size),
        "held": [lookups.holds(waiting.request_id, key) for key in waiting.block_hashes[:last]],
        "tokens": waiting.num_tokens,
    }
    worker.engine.abort_request(["probe"])
    settle(worker)
    return answer


def explain(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What ``explain`` says of a request, and how many steps the engine could have made until then."""
    core = worker.engine.engine_core.engine_core
    names = ("span_starts", "cross_span_starts", "span_gap_policy")
    extra = {name: request[name] for name in names if request.get(name) is not None}
    answer = core.spans_explain(request["tokens"], extra, request.get("salt"))
    waits = not answer.done()
    return {**answer.result(timeout=30), "waits": waits}


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


def reset_when_loaded(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Reset the KV cache when a request waits with what was loaded for it, and no job is on its way.

    Returns:
        ``reset``: the answer, and the request's ``result``.
    """
    results: dict[str, Any] = {request["id"]: {"outputs": []}}
    tiers, waiting = _tiers(worker), worker.scheduler.kv_holding_waiting
    worker.add(request)
    end = time.monotonic() + 60
    while tiers.busy or not len(waiting):
        assert time.monotonic() < end, "nothing is loaded"
        worker.collect(results)
    reset = bool(worker.engine.reset_prefix_cache(reset_running_requests=True))
    while worker.engine.has_unfinished_requests():
        worker.collect(results)
    return {"reset": reset, "result": results[request["id"]]}


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


def change_user(worker: Any, number: int) -> None:
    """Let all threads of the process work for another user from now on; root may go on as root later."""
    import os

    settle(worker)
    os.seteuid(number)


def be_patient(worker: Any, seconds: float = 60) -> None:
    """Let requests wait for files again, as they do some time after files were slow, and for how long."""
    import math

    lookups = _tiers(worker).lookups
    lookups._impatient_until = -math.inf
    lookups.load_timeout = seconds


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
