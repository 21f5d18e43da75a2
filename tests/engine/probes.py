"""Functions that run inside an engine process and look at, or disturb, its KV cache."""

from __future__ import annotations

import random
from typing import Any

import torch


def _pool(worker: Any) -> Any:
    return worker.scheduler.kv_cache_manager.block_pool


def _kv_caches(worker: Any) -> list[torch.Tensor]:
    core = worker.engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    caches = runner.kv_caches
    return list(caches.values()) if isinstance(caches, dict) else list(caches)


def _by_block(worker: Any, cache: torch.Tensor) -> torch.Tensor:
    count = worker.scheduler.vllm_config.cache_config.num_gpu_blocks
    (axis, *_) = [i for i, size in enumerate(cache.shape) if size == count]
    return cache.movedim(axis, 0)


def kv_by_key(worker: Any) -> dict[str, list[float]]:
    """What every published block holds, as one number per layer that any change of its KV changes.

    Returns:
        Block key in hex -> projections of the block's KV, one per layer.
    """
    worker.drain()
    cached = [b for b in _pool(worker).blocks if b.block_hash is not None]
    result: dict[str, list[float]] = {bytes(b.block_hash).hex(): [] for b in cached}
    for cache in _kv_caches(worker):
        blocks = _by_block(worker, cache)
        size = blocks[0].numel()
        probe = torch.randn(size, generator=torch.Generator().manual_seed(1)) / size**0.5
        for block in cached:
            value = blocks[block.block_id].reshape(-1).float() @ probe
            result[bytes(block.block_hash).hex()].append(float(value))
    return result


def evict_some(worker: Any, share: float, seed: int) -> int:
    """Evict a random share of the cached blocks that nobody holds, in the middle of spans as well.

    Args:
        worker: The engine process.
        share: Share of the cached idle blocks to evict.
        seed: Random seed.

    Returns:
        How many were evicted.
    """
    worker.drain()
    pool = _pool(worker)
    idle = [b.block_id for b in pool.blocks if b.block_hash is not None and b.ref_cnt == 0]
    chosen = set(random.Random(seed).sample(idle, round(share * len(idle))))
    pool.evict_blocks(chosen)
    return len(chosen)


def scribble_free_blocks(worker: Any, value: float = 7.0) -> int:
    """Overwrite the KV of every block that is neither held nor cached, so that reading one shows.

    Returns:
        How many blocks were overwritten.
    """
    worker.drain()
    free = [
        b.block_id
        for b in _pool(worker).blocks
        if b.block_hash is None and b.ref_cnt == 0 and not b.is_null
    ]
    for cache in _kv_caches(worker):
        _by_block(worker, cache)[torch.tensor(free)] = value
    return len(free)


def held_blocks(worker: Any) -> list[tuple[int, int]]:
    """Blocks with references at idle, as ``(id, count)``; the null block is left out."""
    worker.drain()
    return [(b.block_id, b.ref_cnt) for b in _pool(worker).blocks if b.ref_cnt and not b.is_null]


def cache_groups(worker: Any) -> list[str]:
    """Kind of each KV cache group."""
    groups = worker.scheduler.kv_cache_config.kv_cache_groups
    return [type(group.kv_cache_spec).__name__ for group in groups]


def compiled_graphs(worker: Any) -> int:
    """How many graphs torch.compile has made of the model."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def blocks_held_after(worker: Any, steps: int, request: dict[str, Any]) -> int:
    """Real blocks in a request's table after as many answer tokens; the request is aborted then."""
    worker.add({**request, "id": "held", "max_tokens": steps + 10})
    while worker.engine.has_unfinished_requests():
        worker.engine.step()
        # vLLM tells the scheduler's own request id from the one that was given.
        (inside,) = worker.scheduler.requests.values()
        if inside.num_output_tokens == steps:
            (table,) = worker.scheduler.kv_cache_manager.get_blocks(inside.request_id).blocks
            worker.engine.abort_request(["held"])
            worker.drain()
            return sum(not block.is_null for block in table)
    raise RuntimeError(f"the answer ended before {steps} tokens")


def leftovers(worker: Any) -> dict[str, int]:
    """Sizes of the containers that must be empty, or as at the start, when the engine is idle."""
    worker.drain()
    scheduler = worker.scheduler
    runner = worker.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return {
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "finished_req_ids": len(scheduler.finished_req_ids),
        "worker_requests": len(getattr(runner, "requests", {})),
        "worker_batch": len(getattr(getattr(runner, "input_batch", None), "req_ids", [])),
    }


def spans_modules_in_use(worker: Any) -> list[str]:
    """Classes of the plugin among the objects that an engine is made of."""
    core = worker.engine.engine_core.engine_core
    scheduler = worker.scheduler
    runner = core.model_executor.driver_worker.worker.model_runner
    parts = [
        scheduler,
        scheduler.kv_cache_manager,
        scheduler.kv_cache_manager.block_pool,
        runner,
        *(group.backend for groups in runner.attn_groups for group in groups),
        *runner.get_model().modules(),
    ]
    names = set()
    for part in parts:
        kind = part if isinstance(part, type) else type(part)
        forward = getattr(part, "forward", None)
        for module in (kind.__module__, getattr(forward, "__module__", None)):
            if module and module.startswith("vllm_spans"):
                names.add(f"{module}.{kind.__qualname__}")
    return sorted(names)


def allow_async_scheduling() -> None:
    """Called before the engine loads: keep the asynchronous scheduling that the CPU platform turns off."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
