"""GPU worker whose model rotates Q only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_spans.attention.cache_specs import keep_all_blocks
from vllm_spans.attention.flash_backend import SpansFlashAttentionImpl
from vllm_spans.attention.rotary import install_query_rotary
from vllm_spans.gate import rope_layers

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = logging.getLogger(__name__)


class SpansGPUWorker(Worker):
    """vLLM's GPU worker with the runner for short rows; the model is changed between loading and compiling it."""

    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            return super()._make_model_runner()
        from vllm_spans.attention.gpu_runner import SpansGPUModelRunner

        return SpansGPUModelRunner(self.vllm_config, self.device)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return keep_all_blocks(super().get_kv_cache_spec())

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        layers = install_query_rotary(
            self.model_runner.get_model(), rope_layers(self.model_config.architecture)
        )
        attention = self.vllm_config.compilation_config.static_forward_context[next(iter(layers))]
        scratch_bytes = SpansFlashAttentionImpl.allocate_scratch(
            self.vllm_config,
            attention.num_kv_heads,
            attention.head_size,
            attention.kv_cache_torch_dtype,
            self.device,
        )
        logger.info(
            "spans: K of %d attention layers is cached un-rotated; scratch cache of %.2f GiB",
            len(layers),
            scratch_bytes / 2**30,
        )
