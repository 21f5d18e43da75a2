"""What the scheduler's side of the connector and the worker's tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class CopyJob:
    """Blocks to copy between the KV cache and CPU memory.

    Attributes:
        job_id: Unique in the engine.
        blocks: Blocks of the KV cache.
        rows: Rows of CPU memory, one for each block.
        request_id: For a load that vLLM's own scheduler waits for, its request.
    """

    job_id: int
    blocks: Sequence[int]
    rows: Sequence[int]
    request_id: str | None = None


@dataclass
class SpansConnectorMetadata(KVConnectorMetadata):
    """Jobs of one step: loads start after the step's forward pass, stores copy what it wrote."""

    loads: list[CopyJob] = field(default_factory=list)
    stores: list[CopyJob] = field(default_factory=list)


@dataclass(frozen=True)
class JobReport:
    """What workers have reported of a job.

    Attributes:
        workers: How many have ended their part of it.
        success: Whether all of these have done it.
        seconds: What the copy took, the slowest of them.
    """

    workers: int
    success: bool
    seconds: float

    def joined(self, other: JobReport) -> JobReport:
        """This report and one of other workers."""
        return JobReport(
            self.workers + other.workers,
            self.success and other.success,
            max(self.seconds, other.seconds),
        )


@dataclass
class SpansWorkerMetadata(KVConnectorWorkerMetadata):
    """Jobs that ended, by id: each worker copies its part of every block."""

    ended: dict[int, JobReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join reports of different workers."""
        assert isinstance(other, SpansWorkerMetadata)
        return SpansWorkerMetadata(join_reports(self.ended, other.ended))


def join_reports(
    ended: Mapping[int, JobReport], more: Mapping[int, JobReport]
) -> dict[int, JobReport]:
    """Reports by job from both."""
    joined = dict(ended)
    for job_id, report in more.items():
        joined[job_id] = joined[job_id].joined(report) if job_id in joined else report
    return joined
