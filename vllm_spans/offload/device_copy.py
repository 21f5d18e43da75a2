"""Copies of blocks between a GPU's KV cache and pinned CPU memory: vLLM's own worker, on streams of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from vllm_spans.offload.host_copy import forget_name

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class DeviceCopyWorker(CPUOffloadingWorker):
    """A copy waits for the kernels that were launched before it, and no kernel waits for a copy.

    So a block has to be held until the end of its job is reported, be it read (a store) or written (a load).

    Args:
        kv_caches: Pages of each layer as bytes, ``[blocks, page size]``.
        region: CPU memory shared with the scheduler's process, pinned here; a row holds one block, layer by layer.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        super().__init__(
            kv_caches=kv_caches,
            blocks_per_chunk=1,
            num_cpu_chunks=region.num_chunks,
            mmap_region=region,
        )

    def shutdown(self) -> None:
        """Wait for the copies under way and give the memory back."""
        if self._mmap_region is not None:
            forget_name(self._mmap_region)
        super().shutdown()
