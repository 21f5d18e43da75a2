"""Functions that run inside an engine process and look at, or disturb, what decides on loads."""

from __future__ import annotations

import random
import time
from typing import Any

from tests.offload.probes import _tiers, settle

_stock: dict[str, Any] = {}


def slow_reads(worker: Any, seconds: float) -> None:
    """Let every file take a while to read."""
    from vllm_spans.offload.file_store import FileStore

    stock = _stock["read_into"] = FileStore.read_into

    def read_into(*args: Any) -> None:
        time.sleep(seconds)
        stock(*args)

    FileStore.read_into = read_into  # type: ignore[method-assign]


def restore_reads(worker: Any) -> None:
    """Undo ``slow_reads``."""
    from vllm_spans.offload.file_store import FileStore

    FileStore.read_into = _stock.pop("read_into")  # type: ignore[method-assign]


def unlearn(worker: Any) -> None:
    """Let the cost model know nothing again."""
    cost = _tiers(worker).lookups._cost
    cost.__init__(cost._block_tokens, cost._block_bytes)


def choose_at_random(worker: Any, seed: int, share: float = 0.5) -> None:
    """Let chance decide what is loaded, until ``choose_again``: so much of it."""
    rng = random.Random(seed)

    def choose(runs: Any, queued_blocks: int = 0, prefix: bool = False) -> list[bool]:
        chosen = [rng.random() < share for _ in runs]
        return sorted(chosen, reverse=True) if prefix else chosen

    _tiers(worker).lookups._cost.choose = choose


def choose_again(worker: Any) -> None:
    """Undo ``choose_at_random``."""
    del _tiers(worker).lookups._cost.choose


def count_questions(worker: Any, request: dict[str, Any], steps: int) -> list[int]:
    """How often a key is looked up in each of some steps, while a request waits that is aborted then."""
    settle(worker)
    tiers, counts = _tiers(worker), []
    asked = 0
    parts = [
        (tiers._manager, "lookup"),
        (tiers.file_tier, "lookup"),
        (worker.scheduler._asking._tables, "find"),
    ]

    def counting(stock: Any) -> Any:
        def lookup(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            return stock(*args, **kwargs)

        return lookup

    for part, name in parts:
        setattr(part, name, counting(getattr(part, name)))
    try:
        worker.add({**request, "id": "asks"})
        for _ in range(steps):
            asked = 0
            worker.collect({})
            counts.append(asked)
        assert worker.engine.has_unfinished_requests(), "it does not wait"
        worker.engine.abort_request(["asks"])
    finally:
        for part, name in parts:
            delattr(part, name)
    return counts


def run_queue(worker: Any, busy: list[dict[str, Any]], queue: list[dict[str, Any]]) -> Any:
    """Run requests that hold the engine for long, and such that wait behind them, until those are read ahead.

    Returns:
        ``ahead``: for each waiting request which of its blocks came into CPU memory while nothing had ended yet,
        ``rows``: most rows of CPU memory that were taken for waiting requests at once, ``room``: rows that may be,
        ``pinned``: rows that a waiting request held.
    """
    settle(worker)
    lookups, primary = _tiers(worker).lookups, _tiers(worker)._manager.primary_tier
    room = lookups._prefetch._room
    for request in (*busy, *queue):
        worker.add(request)
    waiting = list(worker.scheduler.waiting)[len(busy) :]
    ahead: list[set[int]] = [set() for _ in waiting]
    rows = pinned = 0
    results: dict[str, Any] = {request["id"]: {"outputs": []} for request in (*busy, *queue)}
    while not any(result["outputs"] for result in results.values()):
        worker.collect(results)
        time.sleep(0.001)
        rows = max(rows, room - lookups._prefetch._room)
        for index, request in enumerate(waiting):
            if request.request_id not in lookups._requests:
                continue
            pinned += len(lookups._requests[request.request_id].pinned)
            for block, key in enumerate(request.block_hashes):
                chunk = primary._policy.get(bytes(key) + bytes(4))
                if chunk is not None and chunk.is_ready:
                    ahead[index].add(block)
    return {
        "ahead": [sorted(blocks) for blocks in ahead],
        "rows": rows,
        "room": room,
        "pinned": pinned,
    }


def finish(worker: Any, names: list[str], abort: list[str]) -> dict[str, Any]:
    """Abort some requests and let all others end.

    Returns:
        Results of those that are named.
    """
    worker.engine.abort_request(abort)
    results: dict[str, Any] = {name: {"outputs": []} for name in names}
    while worker.engine.has_unfinished_requests():
        worker.collect(results)
    settle(worker)
    return results


def free_room(worker: Any) -> int:
    """Rows of CPU memory that may still be read ahead."""
    return int(_tiers(worker).lookups._prefetch._room)
