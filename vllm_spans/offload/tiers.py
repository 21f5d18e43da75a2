"""Tiers: the scheduler's view of CPU memory and files.

Lookups by key, loads into held blocks, stores of what is published.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_spans.offload.file_tier import SpansFileTier
from vllm_spans.offload.metadata import CopyJob, SpansConnectorMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    from vllm_spans.core.block_tables import SpanBlockTables
    from vllm_spans.core.hashing import Key
    from vllm_spans.metrics.stats import SpanStats

logger = logging.getLogger(__name__)

_GROUP = 0
_IMPATIENCE = 30.0
"""Seconds after a request has waited in vain in which no other one waits."""
_STORE_BATCH = 32
"""A batch that finds no room is not stored; smaller ones fill a small tier better."""


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
        deadline: When it stops waiting.
        pinned: Found blocks, pinned in CPU memory.
        absent: Keys that no tier has, or not in time.
        barred: Whether a load of it failed: it is computed then, and asks no more.
    """

    context: ReqContext
    deadline: float | None = None
    pinned: dict[Key, _Pin] = field(default_factory=dict)
    absent: set[Key] = field(default_factory=set)
    barred: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    keys: list[Key]
    blocks: list[KVCacheBlock]
    context: ReqContext
    request_id: str
    for_vllm: bool


@dataclass(frozen=True, slots=True)
class _Store:
    keys: list[OffloadKey]
    blocks: list[KVCacheBlock]
    context: ReqContext


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load of a request with spans that ended.

    Attributes:
        job_id: What ``start_load`` returned.
        request_id: Its request, which may be gone.
        success: Whether the blocks are there and published.
    """

    job_id: int
    request_id: str
    success: bool


class Tiers:
    """CPU memory and files behind the KV cache.

    Args:
        manager: vLLM's books of the tiers.
        load_timeout: Seconds that a request waits for a lower tier.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        load_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._load_timeout = load_timeout
        self._clock = clock
        self._requests: dict[str, _Answers] = {}
        self._impatient_until = -math.inf
        self._job_ids = itertools.count()
        self._step_ids = itertools.count()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._new_loads: list[CopyJob] = []
        self._loading: set[Key] = set()
        self._ended: list[EndedLoad] = []
        # Published in this step: block -> its key with the group, as vLLM's pool knows it.
        self._published: dict[int, tuple[KVCacheBlock, bytes]] = {}
        self._tables: SpanBlockTables | None = None
        self._stats: SpanStats | None = None

    def attach(self, tables: SpanBlockTables, stats: SpanStats) -> None:
        """Tie the tiers to a scheduler: its blocks, its counters. From here on what is published is stored."""
        self._tables, self._stats = tables, stats
        tables.watch_published(self._on_published)

    @property
    def busy(self) -> bool:
        """Whether jobs are on their way, whose end frees blocks."""
        return bool(self._loads or self._stores or self._ended)

    @property
    def file_tier(self) -> SpansFileTier | None:
        """The tier of files, if there is one."""
        for tier in self._manager.secondary_tiers:
            if isinstance(tier, SpansFileTier):
                return tier
        return None

    # ---- requests -----------------------------------------------------------------------------------------

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

    def resolve(self, request_id: str, keys: Iterable[Key]) -> bool:
        """Ask the tiers for keys.

        Returns:
            Whether all answers are there. If not, ask again in the next step. Found keys stay pinned until they are
            loaded or released: otherwise a tier smaller than the request would chase its own tail.
        """
        # All keys are asked, though the first open one would do: files are read together.
        answered = [self._ask(request_id, key) for key in keys]
        return all(answered)

    def resolve_prefix(self, request_id: str, keys: Sequence[Key]) -> int | None:
        """How many leading keys the tiers hold, for a request that cannot use what comes after a hole.

        Returns:
            ``None`` while answers are missing.
        """
        answers = self._requests[request_id]
        length, known = 0, True
        for key in keys:
            known &= self._ask(request_id, key)
            if key in answers.absent or answers.barred:
                break
            length += 1
        if not known:
            return None
        used = set(keys[:length])
        self._unpin(answers, [key for key in answers.pinned if key not in used])
        return length

    def _ask(self, request_id: str, key: Key) -> bool:
        answers = self._requests[request_id]
        if answers.barred or key in answers.pinned or key in answers.absent:
            return True
        if key in self._loading:
            # Another request brings it into the KV cache: it will be found there.
            return False
        name = _offload_key(key)
        result = self._manager.lookup(name, answers.context)
        if result is LookupResult.HIT:
            tier = self._manager.get_load_source(name, answers.context)
            spec = self._manager.prepare_load([name], answers.context)
            assert isinstance(spec, CPULoadStoreSpec)
            tier_name = "file" if tier is CacheHitSource.DISK else "cpu"
            answers.pinned[key] = _Pin(int(spec.chunk_ids[0]), tier_name)
            return True
        if result is LookupResult.MISS:
            answers.absent.add(key)
            return True
        now = self._clock()
        if answers.deadline is None:
            # While storage is known to hang, nobody waits for it again.
            answers.deadline = now if now < self._impatient_until else now + self._load_timeout
        if now < answers.deadline:
            return False
        if now >= self._impatient_until:
            self._impatient_until = now + _IMPATIENCE
            logger.warning(
                "files did not come in %.1f s: for %.0f s no request waits for them",
                self._load_timeout,
                _IMPATIENCE,
            )
        answers.absent.add(key)
        self._count_load_failures("timeout", 1)
        return True

    def holds(self, request_id: str, key: Key) -> bool:
        """Whether a key was found and is pinned."""
        return key in self._requests[request_id].pinned

    def tier_of(self, request_id: str, key: Key) -> str:
        """Where a found key was: ``cpu`` or ``file``."""
        return self._requests[request_id].pinned[key].tier

    def release(self, request_id: str) -> None:
        """Forget all answers; what was found may be evicted again."""
        answers = self._requests.get(request_id)
        if answers is not None:
            self._unpin(answers, list(answers.pinned))
            answers.absent.clear()
            answers.deadline = None

    def bar(self, request_id: str) -> None:
        """Let a request compute all it needs: a load of it failed."""
        answers = self._requests.get(request_id)
        if answers is not None:
            answers.barred = True

    def _unpin(self, answers: _Answers, keys: list[Key]) -> None:
        if keys:
            self._manager.complete_load([_offload_key(key) for key in keys], answers.context)
            for key in keys:
                del answers.pinned[key]

    # ---- loads --------------------------------------------------------------------------------------------

    def start_load(
        self, request_id: str, found: Sequence[tuple[Key, KVCacheBlock]], for_vllm: bool = False
    ) -> int:
        """Load pinned keys into blocks, which stay held until the job ends, whatever becomes of the request.

        Args:
            request_id: Its request.
            found: Pinned keys, and the fresh block for each.
            for_vllm: Whether vLLM's own scheduler waits for the load, and publishes the blocks itself.

        Returns:
            The job.
        """
        assert self._tables is not None
        answers = self._requests[request_id]
        keys, blocks = [key for key, _ in found], [block for _, block in found]
        self._tables.hold(blocks)
        rows = [answers.pinned.pop(key).row for key in keys]
        job_id = next(self._job_ids)
        self._loads[job_id] = _Load(keys, blocks, answers.context, request_id, for_vllm)
        self._loading.update(keys)
        self._new_loads.append(
            CopyJob(
                job_id, [block.block_id for block in blocks], rows, request_id if for_vllm else None
            )
        )
        return job_id

    def take_ended(self) -> list[EndedLoad]:
        """Loads of requests with spans that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def end_jobs(self, ended: dict[int, bool]) -> None:
        """Book the end of jobs that the worker reports: id -> success."""
        for job_id, success in ended.items():
            store = self._stores.pop(job_id, None)
            if store is not None:
                self._end_store(store, success)
            else:
                self._end_load(job_id, self._loads.pop(job_id), success)

    def _end_store(self, store: _Store, success: bool) -> None:
        assert self._tables is not None
        self._manager.complete_store(store.keys, store.context, success)
        if success and self._stats is not None:
            self._stats.count_stored("cpu", len(store.keys))
        self._tables.release(store.blocks)

    def _end_load(self, job_id: int, load: _Load, success: bool) -> None:
        assert self._tables is not None
        self._manager.complete_load([_offload_key(key) for key in load.keys], load.context)
        self._loading.difference_update(load.keys)
        if not success:
            self._count_load_failures("copy", len(load.keys))
            self.bar(load.request_id)
        if not load.for_vllm:
            if success:
                for key, block in zip(load.keys, load.blocks, strict=True):
                    self._tables.publish(block, key)
            self._ended.append(EndedLoad(job_id, load.request_id, success))
        self._tables.release(load.blocks)

    # ---- stores -------------------------------------------------------------------------------------------

    def _on_published(self, block: KVCacheBlock, key_with_group: bytes) -> None:
        self._published[block.block_id] = (block, key_with_group)

    def withdraw(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Do not store blocks after all: the step will not write them."""
        if self._published:
            for block in blocks:
                self._published.pop(block.block_id, None)

    def build_metadata(self) -> SpansConnectorMetadata:
        """Jobs of the step that has just been scheduled."""
        metadata = SpansConnectorMetadata(self._new_loads, self._make_stores())
        self._new_loads = []
        self._manager.on_schedule_end(ScheduleEndContext((), ()))
        # vLLM's own statistics of the tiers pile up until they are taken.
        self._manager.get_stats()
        self._report()
        return metadata

    def _make_stores(self) -> list[CopyJob]:
        # A block may have been handed to another owner within the step.
        published = [
            (OffloadKey(bytes(key)), block)
            for block, key in self._published.values()
            if block.block_hash == key
        ]
        self._published = {}
        if not published:
            return []
        assert self._tables is not None
        context = ReqContext(f"vllm-spans-step-{next(self._step_ids)}")
        self._manager.on_new_request(context)
        jobs = []
        for start in range(0, len(published), _STORE_BATCH):
            batch = dict(published[start : start + _STORE_BATCH])
            output = self._manager.prepare_store(list(batch), context)
            if output is None:
                if self._stats is not None:
                    self._stats.count_store_failures("tier_full", len(batch))
                continue
            if not output.keys_to_store:
                continue
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            job_id = next(self._job_ids)
            blocks = [batch[key] for key in output.keys_to_store]
            # The copy may go on while later steps run: nobody may get the blocks until it has ended.
            self._tables.hold(blocks)
            self._stores[job_id] = _Store(output.keys_to_store, blocks, context)
            jobs.append(
                CopyJob(
                    job_id,
                    [block.block_id for block in blocks],
                    [int(row) for row in output.store_spec.chunk_ids],
                )
            )
        self._manager.on_request_finished(context)
        return jobs

    # ---- the whole ----------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Empty CPU memory. Files stay: they are for the weights that are loaded, which do not change.

        Returns:
            False while jobs are on their way, those between CPU memory and files too: storage that hangs must not
            hold the engine. Nothing has changed then.
        """
        self._manager.on_schedule_end(ScheduleEndContext((), ()))
        if self._loads or self._stores or self._manager.has_pending_work():
            return False
        for answers in self._requests.values():
            answers.pinned.clear()
            answers.absent.clear()
            answers.deadline = None
        self._manager.reset_cache()
        return True

    def shutdown(self) -> None:
        """End the tiers."""
        self._manager.shutdown()

    def _count_load_failures(self, reason: str, blocks: int) -> None:
        if self._stats is not None:
            self._stats.count_load_failures(reason, blocks)

    def _report(self) -> None:
        if self._stats is None:
            return
        primary = self._manager.primary_tier
        used = primary._num_allocated_chunks - len(primary._free_list)
        self._stats.show_cpu_memory(used, primary._num_chunks)
        files = self.file_tier
        if files is None:
            return
        if stored := files.stored.take():
            self._stats.count_stored("file", stored)
        for reason, blocks in files.load_failures.take().items():
            self._stats.count_load_failures(reason, blocks)
        for reason, blocks in files.store_failures.take().items():
            self._stats.count_store_failures(reason, blocks)


def _offload_key(key: Key) -> OffloadKey:
    return make_offload_key(BlockHash(key), _GROUP)
