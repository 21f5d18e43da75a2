"""Prefetch: files of waiting requests are read into CPU memory while those in front of them run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

    from vllm_spans.core.hashing import Key
    from vllm_spans.offload.cost import CostModel

    Ask = Callable[[Key, ReqContext], LookupResult]

REQUESTS = 16
"""How many requests at the head of the queue are looked after."""
_SHARE = 4
"""What is read ahead fills at most one row of CPU memory in so many: the rest is for those who run."""


@dataclass(slots=True)
class _Ahead:
    """A request that waits.

    Attributes:
        runs: Keys that it will ask for.
        open: Those of which it is not known yet where they are; empty when its reads have begun.
        rows: Rows of CPU memory that were taken for it.
        done: Whether there is nothing left to do for it.
    """

    runs: Sequence[Sequence[Key]]
    open: deque[Key]
    rows: int = 0
    done: bool = False


class Prefetch:
    """Reads ahead, within a share of CPU memory.

    Nothing is pinned: a row that was read ahead may be evicted by a request that is planned earlier, and its file is
    read once more then. What waiting requests find in CPU memory counts as used, so that reading ahead evicts others.

    Args:
        locate: Says where a key is, and starts nothing.
        fetch: Starts the read of a key's file.
        touch: Notes that keys in CPU memory are used.
        cost: Says what is worth having in CPU memory; without it, everything.
        rows: Rows of CPU memory; 0 where there are no files.
    """

    def __init__(
        self,
        locate: Ask,
        fetch: Ask,
        touch: Callable[[Sequence[Key], ReqContext], None],
        cost: CostModel | None,
        rows: int,
    ) -> None:
        self._locate = locate
        self._fetch = fetch
        self._touch = touch
        self._cost = cost
        self._room = rows // _SHARE
        self._requests: dict[str, _Ahead] = {}

    def advance(
        self,
        request_id: str,
        context: ReqContext,
        runs_of: Callable[[], Sequence[Sequence[Key]]],
        prefix: bool,
    ) -> None:
        """Do what can be done for a waiting request in this step.

        Args:
            request_id: Its request.
            context: Its name for vLLM's manager.
            runs_of: Gives the keys that it will ask for; called once.
            prefix: Whether a key is of use only if all before it are found.
        """
        ahead = self._requests.get(request_id)
        if (ahead is not None and ahead.done) or self._room <= 0:
            return
        if ahead is None:
            runs = runs_of()
            keys = dict.fromkeys(key for run in runs for key in run)
            ahead = self._requests[request_id] = _Ahead(
                runs, deque(key for key in keys if self._is_open(key, context))
            )
        while ahead.open:
            if self._is_open(ahead.open[0], context):
                return
            ahead.open.popleft()
        self._read(ahead, context, prefix)
        ahead.runs, ahead.done = (), True

    def hand_over(self, request_id: str) -> None:
        """A request asks for itself from now on; the room that was taken for it is free for others."""
        ahead = self._requests.setdefault(request_id, _Ahead((), deque()))
        self._room += ahead.rows
        ahead.rows, ahead.done = 0, True

    def forget(self, request_id: str) -> None:
        """A request is over, or begins to wait anew."""
        ahead = self._requests.pop(request_id, None)
        if ahead is not None:
            self._room += ahead.rows

    def _is_open(self, key: Key, context: ReqContext) -> bool:
        return self._locate(key, context) is LookupResult.RETRY

    def _read(self, ahead: _Ahead, context: ReqContext, prefix: bool) -> None:
        """Start the reads whose blocks are of use once they are in CPU memory; nobody waits while they are read."""
        runs = self._found(ahead.runs, context, prefix)
        sizes = [len(run) for run in runs]
        pays = [True] * len(sizes) if self._cost is None else self._cost.pays_from_cpu(sizes)
        useful = dict(item for run, take in zip(runs, pays, strict=True) if take for item in run)
        self._touch([key for key, place in useful.items() if place is LookupResult.HIT], context)
        for key, place in useful.items():
            if place is LookupResult.HIT:
                continue
            if self._room <= 0 or self._fetch(key, context) is LookupResult.MISS:
                return
            self._room -= 1
            ahead.rows += 1

    def _found(
        self, asked: Sequence[Sequence[Key]], context: ReqContext, prefix: bool
    ) -> list[list[tuple[Key, LookupResult]]]:
        runs: list[list[tuple[Key, LookupResult]]] = []
        for keys in asked:
            places = [(key, self._locate(key, context)) for key in keys]
            absent = [place is LookupResult.MISS for _, place in places]
            if prefix and any(absent):
                return [*runs, places[: absent.index(True)]]
            runs.append([item for item, gone in zip(places, absent, strict=True) if not gone])
        return runs
