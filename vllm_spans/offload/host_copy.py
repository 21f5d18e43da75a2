"""Copies of blocks between the KV cache and CPU memory where both are in main memory: the CPU build."""

from __future__ import annotations

import logging
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

logger = logging.getLogger(__name__)

_BLOCKS_AT_ONCE = 64
"""Bounds the copy's temporary memory."""


class HostCopyWorker(OffloadingWorker):
    """vLLM's worker interface for the CPU build, which has none of its own.

    A store copies at once: the next step may overwrite the block, and memory is copied far faster than KV is computed.
    A load runs in a thread of its own, so that the engine's steps go on.

    Args:
        kv_caches: Pages of each layer as bytes, ``[blocks, page size]``.
        region: CPU memory shared with the scheduler's process; a row holds one block, layer by layer.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._copies = [
            (cache.tensor, region.create_next_worker_view(cache.tensor.shape[1]))
            for cache in kv_caches.tensors
        ]
        self._thread = ThreadPoolExecutor(1, "vllm-spans-load")
        self._finished: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks to CPU memory, now."""
        assert isinstance(dst_spec, CPULoadStoreSpec)
        blocks, rows = _indices(src_spec), _indices(dst_spec)
        self._run(job_id, lambda pages, host: copy_rows(pages, blocks, host, rows))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks back from CPU memory, in the background."""
        assert isinstance(src_spec, CPULoadStoreSpec)
        rows, blocks = _indices(src_spec), _indices(dst_spec)
        self._thread.submit(
            self._run, job_id, lambda pages, host: copy_rows(host, rows, pages, blocks)
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call."""
        results = []
        while not self._finished.empty():
            results.append(self._finished.get())
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Loads are waited for by nobody here: a block is held until its job is reported."""

    def shutdown(self) -> None:
        """End the thread and give the memory back."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copies.clear()
        forget_name(self._region)
        self._region.cleanup()

    def _run(self, job_id: int, copy: Copy) -> None:
        try:
            for pages, host in self._copies:
                copy(pages, host)
            self._finished.put(TransferResult(job_id, True))
        except Exception:
            logger.exception("copy job %d failed", job_id)
            self._finished.put(TransferResult(job_id, False))


if TYPE_CHECKING:
    from collections.abc import Callable

    Copy = Callable[[torch.Tensor, torch.Tensor], None]


def forget_name(region: SharedOffloadRegion) -> None:
    """Let a region be given back without its name, which the scheduler has dropped."""
    if not os.path.exists(region.mmap_path):
        region._creator = False


def copy_rows(
    source: torch.Tensor,
    source_rows: torch.Tensor,
    target: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """Copy rows of one matrix of bytes to rows of another.

    Args:
        source: ``[rows, bytes]``.
        source_rows: ``[n]``.
        target: ``[other rows, bytes]``.
        target_rows: ``[n]``, each at most once.
    """
    for start in range(0, source_rows.shape[0], _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        target.index_copy_(0, target_rows[part], source.index_select(0, source_rows[part]))


def _indices(spec: GPULoadStoreSpec | CPULoadStoreSpec) -> torch.Tensor:
    return torch.from_numpy(spec.block_ids).to(torch.int64)
