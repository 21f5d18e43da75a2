"""CPU worker whose model rotates Q only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spans.attention.cache_specs import keep_all_blocks
from vllm_spans.attention.rotary import install_query_rotary
from vllm_spans.gate import rope_layers

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = logging.getLogger(__name__)


class SpansCPUWorker(CPUWorker):
    """vLLM's CPU worker; the model is changed between loading and compiling it."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return keep_all_blocks(super().get_kv_cache_spec())

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        layers = install_query_rotary(
            self.model_runner.get_model(), rope_layers(self.model_config.architecture)
        )
        without = sum(rotary is None for rotary in layers.values())
        logger.info(
            "spans: K of %d attention layers is cached un-rotated (%d without RoPE)",
            len(layers),
            without,
        )
