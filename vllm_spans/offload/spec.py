"""SpansOffloadingSpec: vLLM's tiers, with our file tier and a worker for the CPU build or a GPU."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_spans.offload.device_copy import DeviceCopyWorker
from vllm_spans.offload.host_copy import HostCopyWorker
from vllm_spans.offload.settings import OffloadSettings, OffloadSettingsError
from vllm_spans.sizes import format_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker


class SpansOffloadingSpec(TieringOffloadingSpec):
    """Tiers of one engine."""

    @classmethod
    def build(
        cls, config: VllmConfig, kv_cache_config: KVCacheConfig, settings: OffloadSettings
    ) -> SpansOffloadingSpec:
        """Spec of an engine, not yet with its file tier.

        Raises:
            OffloadSettingsError: The CPU tier holds not one block.
        """
        stock = build_offloading_config(config, kv_cache_config)
        extra = {"cpu_bytes_to_use": settings.cpu_memory, "eviction_policy": settings.policy}
        spec = cls(dataclasses.replace(stock, extra_config=extra))
        if spec.num_chunks < 1:
            raise OffloadSettingsError(
                f"cpu_memory of {format_size(settings.cpu_memory)} holds no block: one takes "
                f"{format_size(spec.kv_bytes_per_chunk)}. Set at least that, better a hundred times as much."
            )
        return spec

    def add_file_tier(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, settings: OffloadSettings
    ) -> None:
        """Put files behind the CPU tier, before the manager is made."""
        from vllm_spans.offload.identity import cache_identity

        self.secondary_tier_configs.append(
            {
                "type": "SpansFileTier",
                "module_path": "vllm_spans.offload.file_tier",
                "root": settings.files,
                "limit": settings.files_limit,
                "threads": settings.file_threads,
                "name": config.model_config.model,
                "identity": cache_identity(config, kv_cache_config, self.kv_bytes_per_chunk),
            }
        )

    def make_manager(self) -> TieringOffloadingManager:
        """The tiers' books; the worker has mapped the shared memory by now, so its name is dropped.

        Without a name no kind of death leaves the memory behind.
        """
        manager = self.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        region = self._scheduler_mmap
        assert region is not None
        if not region._creator:
            os.unlink(region.mmap_path)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Worker that copies between the KV cache and CPU memory."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        worker = DeviceCopyWorker if current_platform.is_cuda() else HostCopyWorker
        return worker(kv_caches, region)
