"""Lookups: what the tiers hold of each request, and what of it is loaded rather than computed.

Finding out takes steps: whether there are files is asked in a thread, and a file is read into CPU memory before its
block can be loaded. So a request asks once, and waits for the first key that is still open.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_spans.offload.cost import CPU, FILE, Run
from vllm_spans.offload.prefetch import REQUESTS, Prefetch

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    from vllm_spans.core.hashing import Key
    from vllm_spans.metrics.stats import SpanStats
    from vllm_spans.offload.cost import CostModel
    from vllm_spans.offload.file_tier import SpansFileTier

logger = logging.getLogger(__name__)

_GROUP = 0
_FILES = 0
"""Index of the file tier among vLLM's secondary tiers, if there is one."""
_IMPATIENCE = 30.0
"""Seconds after a request has waited in vain in which no other one waits."""


def offload_key(key: Key) -> OffloadKey:
    """A key as vLLM's managers know it."""
    return make_offload_key(BlockHash(key), _GROUP)


@dataclass(frozen=True, slots=True)
class _Pin:
    """A block of the CPU tier that stays where it is."""

    row: int
    tier: str


@dataclass(slots=True)
class _Answers:
    """What one request knows of the tiers.

    Attributes:
        context: Its name for vLLM's manager.
        runs: Keys that it asks for, those of one span together.
        prefix: Whether a key is of use only if all before it are found.
        asked: All of them since it last forgot.
        open: Those that it waits for, in order.
        found: Keys in files or on their way into CPU memory; not decided yet whether they are waited for.
        wanted: Keys that are to be loaded, in order.
        deadline: When it stops waiting.
        pinned: Found blocks, pinned in CPU memory.
        absent: Keys that no tier has, or not in time, or that are cheaper to compute.
        barred: Whether a load of it failed: it is computed then, and asks no more.
    """

    context: ReqContext
    runs: Sequence[Sequence[Key]] = ()
    prefix: bool = False
    asked: set[Key] = field(default_factory=set)
    open: deque[Key] = field(default_factory=deque)
    found: set[Key] = field(default_factory=set)
    wanted: dict[Key, None] = field(default_factory=dict)
    deadline: float | None = None
    pinned: dict[Key, _Pin] = field(default_factory=dict)
    absent: set[Key] = field(default_factory=set)
    barred: bool = False

    def forget(self) -> None:
        """Know nothing any more; what is pinned has been let go."""
        self.runs = ()
        self.deadline = None
        for answers in (self.asked, self.open, self.found, self.wanted, self.pinned, self.absent):
            answers.clear()


class Lookups:
    """Keys of requests in CPU memory and files.

    Args:
        manager: vLLM's books of the tiers.
        files: The tier of files, if there is one.
        load_timeout: Seconds that a request waits for files.
        cost: Says what is loaded; without it, all that is found.
        clock: Seconds.

    Attributes:
        loading: Keys that a load is bringing into the KV cache.
        load_timeout: As given.
        stats: Counts what was not loaded, and why.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        files: SpansFileTier | None,
        load_timeout: float,
        cost: CostModel | None,
        clock: Callable[[], float],
    ) -> None:
        self.loading: set[Key] = set()
        self.stats: SpanStats | None = None
        self.load_timeout = load_timeout
        self._manager = manager
        self._files = files
        self._cost = cost
        self._clock = clock
        self._requests: dict[str, _Answers] = {}
        self._impatient_until = -math.inf
        rows = manager.primary_tier._num_chunks if files is not None else 0
        self._prefetch = Prefetch(self._locate, self._fetch, self._touch, cost, rows)

    def add_request(self, request_id: str) -> None:
        """A request arrives."""
        context = ReqContext(request_id)
        self._manager.on_new_request(context)
        self._requests[request_id] = _Answers(context)

    def finish_request(self, request_id: str) -> None:
        """A request is over; its loads may not be."""
        self.release(request_id)
        answers = self._requests.pop(request_id, None)
        if answers is not None:
            self._manager.on_request_finished(answers.context)

    # ---- questions ----------------------------------------------------------------------------------------

    def resolve(self, request_id: str, runs: Sequence[Sequence[Key]], prefix: bool = False) -> bool:
        """Ask the tiers for keys, and decide which of them are loaded.

        Args:
            request_id: Its request.
            runs: Keys of consecutive blocks, those of one span together.
            prefix: Whether a key is of use only if all before it are found.

        Returns:
            Whether all answers are there. If not, ``poll`` in the next step. Keys that are loaded stay pinned until
            then, or until they are released: otherwise a tier smaller than the request would chase its own tail.
        """
        answers = self._requests[request_id]
        self._prefetch.hand_over(request_id)
        if answers.barred:
            return True
        answers.runs, answers.prefix = runs, prefix
        # All keys are asked, though the first open one would do: files are looked for together.
        for key in itertools.chain.from_iterable(runs):
            if key not in answers.asked:
                answers.asked.add(key)
                if not self._is_answered(answers, key):
                    answers.open.append(key)
        return self._advance(answers)

    def poll(self, request_id: str) -> bool:
        """Whether all that was asked is answered; cheap while it is not."""
        answers = self._requests[request_id]
        return answers.barred or self._advance(answers)

    def resolve_prefix(self, request_id: str, keys: Sequence[Key]) -> int | None:
        """How many leading keys are loaded, for a request that cannot use what comes after a hole.

        Returns:
            ``None`` while answers are missing.
        """
        if not self.poll(request_id) or not self.resolve(request_id, [keys], prefix=True):
            return None
        answers = self._requests[request_id]
        length = next((i for i, key in enumerate(keys) if key not in answers.pinned), len(keys))
        used = set(keys[:length])
        self._unpin(answers, [key for key in answers.pinned if key not in used])
        return length

    @property
    def reads_ahead(self) -> int:
        """For how many requests at the head of the queue ``prefetch`` does something; 0 where there are no files."""
        return REQUESTS if self._files is not None else 0

    def prefetch(
        self, request_id: str, runs_of: Callable[[], Sequence[Sequence[Key]]], prefix: bool
    ) -> None:
        """Have files of a waiting request read into CPU memory; to be called in every step while it waits.

        Nothing is pinned for it, so a request that is planned first may have the room.

        Args:
            request_id: Its request.
            runs_of: Gives what ``resolve`` will be asked for; called once.
            prefix: As for ``resolve``.
        """
        answers = self._requests[request_id]
        if not answers.barred and self._clock() >= self._impatient_until:
            self._prefetch.advance(request_id, answers.context, runs_of, prefix)

    def holds(self, request_id: str, key: Key) -> bool:
        """Whether a key was found, is to be loaded, and is pinned."""
        return key in self._requests[request_id].pinned

    def tier_of(self, request_id: str, key: Key) -> str:
        """Where a found key was: ``cpu`` or ``file``."""
        return self._requests[request_id].pinned[key].tier

    def take(self, request_id: str, keys: Iterable[Key]) -> tuple[list[int], ReqContext]:
        """Hand pinned keys over to a load.

        Returns:
            Their rows in CPU memory, and the name under which vLLM's manager has pinned them.
        """
        answers = self._requests[request_id]
        return [answers.pinned.pop(key).row for key in keys], answers.context

    def release(self, request_id: str) -> None:
        """Forget all answers; what was found may be evicted again."""
        self._prefetch.forget(request_id)
        answers = self._requests.get(request_id)
        if answers is not None:
            self._unpin(answers, list(answers.pinned))
            answers.forget()

    def bar(self, request_id: str) -> None:
        """Let a request compute all it needs: a load of it failed."""
        answers = self._requests.get(request_id)
        if answers is not None:
            answers.barred = True

    def reset(self) -> None:
        """CPU memory is emptied, pins and all."""
        for request_id, answers in self._requests.items():
            self._prefetch.forget(request_id)
            answers.forget()

    # ---- answers ------------------------------------------------------------------------------------------

    def _advance(self, answers: _Answers) -> bool:
        while True:
            while answers.open:
                key = answers.open[0]
                if not self._is_answered(answers, key):
                    if key in self.loading or not self._is_late(answers):
                        return False
                    answers.absent.add(key)
                    if self.stats is not None:
                        self.stats.count_load_failures("timeout", 1)
                answers.open.popleft()
            answers.open.extend(self._decide(answers))
            if not answers.open:
                # What is asked later has its own time.
                answers.deadline = None
                return True

    def _is_answered(self, answers: _Answers, key: Key) -> bool:
        """Whether there is nothing to wait for: as long as a key is not wanted, no read of it is started."""
        if key in answers.pinned or key in answers.absent:
            return True
        wanted = key in answers.wanted
        if key in self.loading:
            # Another request brings it into the KV cache: it will be found there.
            answers.wanted[key] = None
            return not wanted
        result = (self._fetch if wanted else self._locate)(key, answers.context)
        if result is LookupResult.HIT:
            self._pin(answers, key)
        elif result is LookupResult.MISS:
            answers.absent.add(key)
        elif result is LookupResult.HIT_PENDING and not wanted:
            answers.found.add(key)
        else:
            return False
        return True

    def _locate(self, key: Key, context: ReqContext) -> LookupResult:
        """Where a key is: ``HIT`` in CPU memory, ``HIT_PENDING`` in a file or on its way, ``RETRY`` not known yet."""
        name = offload_key(key)
        result = self._manager.lookup(name, context, exclude_tier_idx=_FILES)
        if result is LookupResult.MISS and self._files is not None:
            result = self._files.lookup(name, context)
            if result is LookupResult.HIT:
                return LookupResult.HIT_PENDING
        return result

    def _fetch(self, key: Key, context: ReqContext) -> LookupResult:
        """As ``_locate``, and a file is read. ``MISS`` also when CPU memory has no room for it."""
        return self._manager.lookup(offload_key(key), context)

    def _touch(self, keys: Sequence[Key], context: ReqContext) -> None:
        self._manager.primary_tier.touch([offload_key(key) for key in keys], context)

    def _is_late(self, answers: _Answers) -> bool:
        now = self._clock()
        if answers.deadline is None:
            # While storage is known to hang, nobody waits for it again.
            answers.deadline = now if now < self._impatient_until else now + self.load_timeout
        if now < answers.deadline:
            return False
        if now >= self._impatient_until:
            self._impatient_until = now + _IMPATIENCE
            logger.warning(
                "files did not come in %.1f s: for %.0f s no request waits for them",
                self.load_timeout,
                _IMPATIENCE,
            )
        return True

    def _decide(self, answers: _Answers) -> list[Key]:
        """Decide on what has been located since the last decision.

        Returns:
            Keys to wait for; reads of their files have begun.
        """
        undecided = self._undecided(answers)
        taken = [True] * len(undecided)
        if self._cost is not None and undecided:
            queued = self._files.queued_before(answers.found) if self._files is not None else 0
            sizes = [Run(tier, len(keys)) for tier, keys in undecided]
            taken = self._cost.choose(sizes, queued, answers.prefix)
        for (tier, keys), take in zip(undecided, taken, strict=True):
            if take:
                answers.wanted.update(dict.fromkeys(keys))
            else:
                self._decline(answers, tier, keys)
        answers.found.clear()
        return [key for key in answers.wanted if not self._is_answered(answers, key)]

    def _undecided(self, answers: _Answers) -> list[tuple[str, list[Key]]]:
        """Runs that lie in one tier, and that nothing has been decided about."""
        runs: list[tuple[str, list[Key]]] = []
        seen: set[Key] = set()
        for keys in answers.runs:
            previous = None
            for key in keys:
                if answers.prefix and key in answers.absent:
                    return runs
                tier = CPU if key in answers.pinned else FILE if key in answers.found else None
                if key in answers.wanted or key in seen:
                    tier = None
                if tier is not None and tier == previous:
                    runs[-1][1].append(key)
                elif tier is not None:
                    runs.append((tier, [key]))
                previous = tier
                seen.add(key)
        return runs

    def _decline(self, answers: _Answers, tier: str, keys: list[Key]) -> None:
        self._unpin(answers, [key for key in keys if key in answers.pinned])
        answers.absent.update(keys)
        if self.stats is not None:
            self.stats.count_declined(tier, len(keys))

    def _pin(self, answers: _Answers, key: Key) -> None:
        name = offload_key(key)
        source = self._manager.get_load_source(name, answers.context)
        spec = self._manager.prepare_load([name], answers.context)
        assert isinstance(spec, CPULoadStoreSpec)
        tier = FILE if source is CacheHitSource.DISK else CPU
        answers.pinned[key] = _Pin(int(spec.chunk_ids[0]), tier)

    def _unpin(self, answers: _Answers, keys: list[Key]) -> None:
        if keys:
            self._manager.complete_load([offload_key(key) for key in keys], answers.context)
            for key in keys:
                del answers.pinned[key]
