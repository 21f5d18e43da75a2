"""What the scheduler's side of the connector and the worker's tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@dataclass
class SpansWorkerMetadata(KVConnectorWorkerMetadata):
    """Jobs that ended.

    Attributes:
        ended: Id -> whether it succeeded.
        seconds: Id -> how long the copy took, for loads.
    """

    ended: dict[int, bool] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join reports of one worker; the gate admits a single one."""
        assert isinstance(other, SpansWorkerMetadata)
        return SpansWorkerMetadata({**self.ended, **other.ended}, {**self.seconds, **other.seconds})
