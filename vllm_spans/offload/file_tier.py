"""The file tier as vLLM's tiering manager sees it: lookups, reads and writes in threads, failures by reason."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from vllm_spans.offload.file_format import FileError, Identity
from vllm_spans.offload.file_store import FileStore
from vllm_spans.offload.pruning import SizeLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from vllm.v1.kv_offload.base import (
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from vllm_spans.core.hashing import Key

logger = logging.getLogger(__name__)

_KEYS_PER_TASK = 8
_LOG_EVERY = 60.0
_MOST_LOOKS = 8
"""Looks at a time; on storage that hangs, so many threads stay with it."""
_GRACE = 10.0
"""Seconds that a shutdown waits for files to be written."""


class FailureCounts:
    """Failures by reason, counted in any thread, logged now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._silent_until = 0.0

    def add(self, error: FileError) -> None:
        """Count a failure."""
        with self._lock:
            self._counts[error.reason] += 1
            now = time.monotonic()
            if now < self._silent_until:
                return
            self._silent_until = now + _LOG_EVERY
        logger.warning("%s failed: %s (told at most once a minute)", self._what, error)

    def take(self) -> Counter[str]:
        """Failures since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


class _Read:
    """A job that reads files, in parts, each in a thread of its own.

    Attributes:
        keys: All of its keys.
        done: Those that were read.
    """

    def __init__(self, keys: list[OffloadKey], clock: Callable[[], float]) -> None:
        self.keys = keys
        self.done: list[OffloadKey] = []
        self._clock = clock
        # Appending to a list is atomic, so threads need no lock here.
        self._begun: list[float] = []
        self._ended: list[float] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """Note when a part begins and ends."""
        self._begun.append(self._clock())
        try:
            yield
        finally:
            self._ended.append(self._clock())

    @property
    def seconds(self) -> float:
        """From the begin of the first part to the end of the last one; what the job waited before is not its own."""
        return max(self._ended) - min(self._begun)


class StoredBlocks:
    """Blocks written, counted in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self) -> None:
        """Count a block."""
        with self._lock:
            self._count += 1

    def take(self) -> int:
        """Blocks since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


class _Lookups(AsyncLookupManager):
    """Asks in a thread whether files exist."""

    def __init__(self, store: FileStore, failures: FailureCounts) -> None:
        self._store = store
        self._failures = failures
        super().__init__("files")

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [self._contains(key) for key in keys]

    def _contains(self, key: OffloadKey) -> bool:
        try:
            return self._store.contains(key)
        except FileError as error:
            self._failures.add(error)
            return False


class SpansFileTier(SecondaryTierManager):
    """Blocks in files.

    Args:
        offloading_spec: Of the engine.
        primary_kv_view: CPU tier, ``[rows, bytes]``.
        tier_type: Name for logs.
        root: Folder of the tier.
        limit: Most bytes in it.
        threads: How many read, and how many write.
        name: Name of the model.
        identity: What the files must match.
        clock: Seconds, for tests.

    Attributes:
        on_read: Told of every job whose files were all read: blocks and seconds.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        root: Path,
        limit: int | None,
        threads: int,
        name: str,
        identity: Identity,
        backpressure_detector: None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.store = FileStore(root, name, identity)
        self.load_failures = FailureCounts("reading a block's file")
        self.store_failures = FailureCounts("writing a block's file")
        self.stored = StoredBlocks()
        self._limit = SizeLimit(root, limit)
        self._memory = primary_kv_view.cast("B")
        self._lookups = _Lookups(self.store, self.load_failures)
        self._looks = threading.BoundedSemaphore(_MOST_LOOKS)
        self._pool = DualQueueThreadPool(threads, threads, "vllm-spans-files")
        self._clock = clock
        self._loads: dict[int, _Read] = {}
        self.on_read: Callable[[int, float], None] | None = None
        logger.info("file tier in %s", self.store.folder)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request asked."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand the step's questions to the thread."""
        self._lookups.flush()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether there is a file; the answer takes a step or more."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def look(self, keys: Sequence[OffloadKey], timeout: float) -> Future[list[OffloadKey]]:
        """Which keys have files, for people who want to know.

        Returns:
            Keys with files. Those that have not been looked at in ``timeout`` seconds are left out, as are those of a
            look that is not begun because storage hangs.
        """
        answer: Future[list[OffloadKey]] = Future()
        found: list[OffloadKey] = []

        def end() -> None:
            with contextlib.suppress(InvalidStateError):
                answer.set_result(list(found))

        def look() -> None:
            try:
                for key in keys:
                    if answer.done():
                        break
                    with contextlib.suppress(FileError):
                        if self.store.contains(key):
                            found.append(key)
            finally:
                self._looks.release()
                late.cancel()
                end()

        late = threading.Timer(timeout, end)
        late.daemon = True
        if self._looks.acquire(blocking=False):
            late.start()
            threading.Thread(target=look, name="vllm-spans-files-look", daemon=True).start()
        else:
            end()
        return answer

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write blocks of the CPU tier."""
        blocks = self._blocks_of(job_metadata)

        def write(part: Sequence[tuple[OffloadKey, memoryview]]) -> None:
            for key, memory in part:
                try:
                    written = self.store.write(key, memory)
                    if written:
                        self.stored.add()
                    self._note_written(written)
                except FileError as error:
                    self.store_failures.add(error)

        self._enqueue(self._pool.enqueue_store, job_metadata.job_id, blocks, write)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read blocks into the CPU tier; those that are read right count, whatever happens to the others."""
        blocks = self._blocks_of(job_metadata)
        job = self._loads[job_metadata.job_id] = _Read([key for key, _ in blocks], self._clock)

        def read(part: Sequence[tuple[OffloadKey, memoryview]]) -> None:
            with job.part():
                for key, memory in part:
                    try:
                        self.store.read_into(key, memory)
                        job.done.append(key)
                    except FileError as error:
                        self.load_failures.add(error)

        self._enqueue(self._pool.enqueue_load, job_metadata.job_id, blocks, read)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        results = []
        for job_id, success, seconds in self._pool.get_finished():
            if job_id not in self._loads:
                results.append(JobResult(job_id, success, transfer_time=seconds))
                continue
            job = self._loads.pop(job_id)
            missing = set(job.keys).difference(job.done)
            if missing:
                self._lookups.mark_miss(missing)
            elif self.on_read is not None:
                self.on_read(len(job.keys), job.seconds)
            results.append(
                JobResult(job_id, not missing, tuple(job.done) or None, transfer_time=seconds)
            )
        return results

    def queued_before(self, keys: Collection[Key]) -> int:
        """Blocks on their way into CPU memory that are not among some keys."""
        return sum(
            get_offload_block_hash(key) not in keys
            for job in self._loads.values()
            for key in job.keys
        )

    def drain_jobs(self) -> None:
        """Wait until nothing reads or writes the CPU tier."""
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """Write what is on its way, for a while, and end the threads.

        Storage that hangs cannot hold the engine: the threads are daemons.
        """
        ended = threading.Thread(target=self._end, name="vllm-spans-files-end", daemon=True)
        ended.start()
        ended.join(_GRACE)
        if ended.is_alive():
            logger.warning(
                "the file tier did not end in %.0f s; what it was writing is lost", _GRACE
            )

    def _end(self) -> None:
        self._pool.wait_idle()
        self._pool.shutdown(wait=True)
        self._lookups.shutdown()
        self._memory.release()

    def _blocks_of(self, job: TransferJob) -> list[tuple[OffloadKey, memoryview]]:
        size = self.block_size_bytes
        return [
            (key, self._memory[int(row) * size : (int(row) + 1) * size])
            for key, row in zip(job.keys, job.chunk_ids, strict=True)
        ]

    def _enqueue(
        self,
        enqueue: Callable[..., None],
        job_id: int,
        blocks: list[tuple[OffloadKey, memoryview]],
        work: Callable[[Sequence[tuple[OffloadKey, memoryview]]], None],
    ) -> None:
        tasks = [
            lambda part=blocks[start : start + _KEYS_PER_TASK]: work(part)  # type: ignore[misc]
            for start in range(0, len(blocks), _KEYS_PER_TASK)
        ]
        enqueue(job_id, len(tasks), tasks)

    def _note_written(self, count: int) -> None:
        try:
            pruned = self._limit.wrote(count)
        except OSError as error:
            raise FileError("io", f"the folder cannot be pruned: {error}") from error
        if pruned is not None and pruned.files:
            logger.info(
                "pruned %d files, %d bytes; %d bytes are left",
                pruned.files,
                pruned.bytes,
                pruned.kept_bytes,
            )
