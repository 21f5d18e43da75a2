"""Tiers: the scheduler's view of CPU memory and files.

Loads into held blocks, stores of what is published; lookups by key are in ``lookups``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_spans.offload.cost import CPU, FILE, TIERS, StepTimes
from vllm_spans.offload.file_tier import SpansFileTier
from vllm_spans.offload.lookups import Lookups, offload_key
from vllm_spans.offload.metadata import (
    CopyJob,
    JobReport,
    SpansConnectorMetadata,
    join_reports,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    from vllm_spans.core.block_tables import SpanBlockTables
    from vllm_spans.core.hashing import Key
    from vllm_spans.metrics.stats import SpanStats
    from vllm_spans.offload.cost import CostModel

_STORE_BATCH = 32
"""A batch that finds no room is not stored; smaller ones fill a small tier better."""


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
        workers: How many copy a part of each block.
        cost: Says what is loaded; without it, all that the tiers hold.
        clock: Seconds, for tests.

    Attributes:
        lookups: What the tiers hold of each request.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        load_timeout: float,
        workers: int = 1,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._workers = workers
        # Of jobs that some workers have ended, and not all.
        self._reports: dict[int, JobReport] = {}
        self._cost = cost
        self.lookups = Lookups(manager, self.file_tier, load_timeout, cost, clock)
        self._step_times: StepTimes | None = None
        if cost is not None:
            self._step_times = StepTimes(cost.add_step, clock)
            if self.file_tier is not None:
                self.file_tier.on_read = partial(cost.add_load, FILE)
        self._job_ids = itertools.count()
        self._step_ids = itertools.count()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._new_loads: list[CopyJob] = []
        self._ended: list[EndedLoad] = []
        # Published in this step: block -> its key with the group, as vLLM's pool knows it.
        self._published: dict[int, tuple[KVCacheBlock, bytes]] = {}
        self._tables: SpanBlockTables | None = None
        self._stats: SpanStats | None = None

    def attach(self, tables: SpanBlockTables, stats: SpanStats) -> None:
        """Tie the tiers to a scheduler: its blocks, its counters. From here on what is published is stored."""
        self._tables, self._stats, self.lookups.stats = tables, stats, stats
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

    # ---- steps --------------------------------------------------------------------------------------------

    def begin_step(self, step: SchedulerOutput) -> None:
        """A step has been planned."""
        if self._step_times is not None:
            self._step_times.begin(step)

    def end_step(self, step: SchedulerOutput) -> None:
        """A step has ended."""
        if self._step_times is not None:
            sequences = len(step.num_scheduled_tokens)
            self._step_times.end(step, sequences, step.total_num_scheduled_tokens)

    # ---- looks --------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """The tiers, the nearest first."""
        return (CPU,) if self.file_tier is None else TIERS

    def look(self, keys: Sequence[Key]) -> Future[dict[Key, str]]:
        """Which tier holds keys, without asking for them: nothing is pinned, read or counted as used.

        Returns:
            The tier of each key that one holds. Files that are slow to be looked at count as missing.
        """
        answer: Future[dict[Key, str]] = Future()
        context = ReqContext("vllm-spans-look")
        in_memory = self._manager.primary_tier.lookup
        held = {k: CPU for k in keys if in_memory(offload_key(k), context) is LookupResult.HIT}
        files = self.file_tier
        if files is None:
            answer.set_result(held)
            return answer
        missing = {offload_key(key): key for key in keys if key not in held}

        def add_files(found: Future[list[OffloadKey]]) -> None:
            answer.set_result(held | {missing[name]: FILE for name in found.result()})

        files.look(list(missing), self.lookups.load_timeout).add_done_callback(add_files)
        return answer

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
        keys, blocks = [key for key, _ in found], [block for _, block in found]
        self._tables.hold(blocks)
        rows, context = self.lookups.take(request_id, keys)
        job_id = next(self._job_ids)
        self._loads[job_id] = _Load(keys, blocks, context, request_id, for_vllm)
        self.lookups.loading.update(keys)
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

    def end_jobs(self, reports: Mapping[int, JobReport]) -> None:
        """Book what workers report: a job has ended when all of them have ended their part of it."""
        self._reports = join_reports(self._reports, reports)
        for job_id in [id_ for id_ in reports if self._reports[id_].workers == self._workers]:
            report = self._reports.pop(job_id)
            store = self._stores.pop(job_id, None)
            if store is not None:
                self._end_store(store, report.success)
            else:
                load = self._loads.pop(job_id)
                if report.success and self._cost is not None:
                    self._cost.add_load(CPU, len(load.keys), report.seconds)
                self._end_load(job_id, load, report.success)

    def _end_store(self, store: _Store, success: bool) -> None:
        assert self._tables is not None
        self._manager.complete_store(store.keys, store.context, success)
        if success and self._stats is not None:
            self._stats.count_stored(CPU, len(store.keys))
        self._tables.release(store.blocks)

    def _end_load(self, job_id: int, load: _Load, success: bool) -> None:
        assert self._tables is not None
        self._manager.complete_load([offload_key(key) for key in load.keys], load.context)
        self.lookups.loading.difference_update(load.keys)
        if not success:
            if self._stats is not None:
                self._stats.count_load_failures("copy", len(load.keys))
            self.lookups.bar(load.request_id)
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
        self.lookups.reset()
        self._manager.reset_cache()
        return True

    def shutdown(self) -> None:
        """End the tiers."""
        self._manager.shutdown()

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
            self._stats.count_stored(FILE, stored)
        for reason, blocks in files.load_failures.take().items():
            self._stats.count_load_failures(reason, blocks)
        for reason, blocks in files.store_failures.take().items():
            self._stats.count_store_failures(reason, blocks)
