"""HostOffloadingSpec: lets vLLM's own ``OffloadingConnector`` run on the CPU build, for which vLLM has no worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_spans.offload.host_copy import HostCopyWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's tier of CPU memory, private to one worker.

    Raises:
        ValueError: The settings want what the copies do not do.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ValueError(
                "HostOffloadingSpec copies block by block: drop block_size from kv_connector_extra_config"
            )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Worker that copies between the KV cache and memory of its own."""
        sizes = [cache.tensor.shape[1] for cache in kv_caches.tensors]
        rows = [torch.empty((self.num_chunks, size), dtype=torch.int8) for size in sizes]
        return HostCopyWorker(kv_caches, rows)
