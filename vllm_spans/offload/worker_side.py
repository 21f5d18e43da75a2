"""The worker's side of the connector: runs copy jobs and reports their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_spans.offload.metadata import JobReport, SpansWorkerMetadata

if TYPE_CHECKING:
    from vllm_spans.offload.metadata import CopyJob, SpansConnectorMetadata


class SpansConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker side, of which the description of the KV cache is used; the jobs are our own."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._running: dict[int, CopyJob] = {}
        self._stores: set[int] = set()
        self._ended: dict[int, JobReport] = {}
        self._failed_blocks: set[int] = set()

    def start_loads(self, metadata: SpansConnectorMetadata) -> None:
        """Start the step's loads, after its forward pass."""
        assert self.worker is not None
        for job in metadata.loads:
            self._running[job.job_id] = job
            self.worker.submit_load(job.job_id, CPULoadStoreSpec(list(job.rows)), _cache_spec(job))

    def store(self, metadata: SpansConnectorMetadata) -> None:
        """Copy what the step published, at its end."""
        assert self.worker is not None
        for job in metadata.stores:
            self._stores.add(job.job_id)
            self.worker.submit_store(job.job_id, _cache_spec(job), CPULoadStoreSpec(list(job.rows)))

    def end_jobs(self) -> set[str]:
        """Note which jobs have ended.

        Returns:
            Requests for whose load vLLM's own scheduler waits, and need not any more.
        """
        assert self.worker is not None
        received: set[str] = set()
        for result in self.worker.get_finished():
            self._ended[result.job_id] = JobReport(1, result.success, result.transfer_time or 0.0)
            if result.job_id in self._stores:
                self._stores.remove(result.job_id)
                continue
            job = self._running.pop(result.job_id)
            if job.request_id is not None:
                received.add(job.request_id)
                if not result.success:
                    self._failed_blocks.update(job.blocks)
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that vLLM's own scheduler believes loaded, and are not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> SpansWorkerMetadata | None:
        """Jobs that ended since the last report."""
        if not self._ended:
            return None
        ended, self._ended = self._ended, {}
        return SpansWorkerMetadata(ended)


def _cache_spec(job: CopyJob) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(job.blocks), group_sizes=(len(job.blocks),), block_indices=(0,))
