"""GPU worker whose model rotates Q only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_spans.attention.cache_specs import keep_all_blocks
from vllm_spans.attention.cuda_scratch import Scratch, ScratchShape
from vllm_spans.attention.rotary import RotaryError, install_query_rotary
from vllm_spans.attention.warm_up import warm_up_decode
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
        context = self.vllm_config.compilation_config.static_forward_context
        attentions = [context[name] for name in layers]
        shapes = {(attention.num_kv_heads, attention.head_size) for attention in attentions}
        if len(shapes) > 1:
            raise RotaryError(
                f"attention layers differ in (KV heads, head size): {sorted(shapes)}; spans need one shape for all, "
                "since they share the scratch cache"
            )
        ((kv_heads, head_size),) = shapes
        scratch = Scratch.allocate(
            ScratchShape.of(self.vllm_config),
            kv_heads,
            head_size,
            self.model_config.dtype,
            self.device,
        )
        for attention in attentions:
            attention.impl.scratch = scratch
        self._attentions = attentions
        logger.info(
            "spans: K of %d attention layers is cached un-rotated; scratch cache of %.2f GiB (%d tokens)",
            len(layers),
            scratch.num_bytes / 2**30,
            scratch.pages.shape[0] * scratch.pages.shape[2],
        )

    def compile_or_warm_up_model(self) -> Any:
        builder = self.model_runner.attn_groups[0][0].get_metadata_builder()
        columns = -(-self.model_config.max_model_len // self.cache_config.block_size)
        count = warm_up_decode(self._attentions, builder.workspace, columns)
        logger.info("spans: %d decode kernels are compiled", count)
        return super().compile_or_warm_up_model()
