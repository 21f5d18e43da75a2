"""CPU worker whose model rotates Q only."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spans.attention.rotary import install_query_rotary
from vllm_spans.gate import NOPE_ARCHITECTURES

logger = logging.getLogger(__name__)


class SpansCPUWorker(CPUWorker):
    """vLLM's CPU worker; the one change is made between loading and compiling the model."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        layers = install_query_rotary(
            self.model_runner.get_model(),
            may_lack_rope=self.model_config.architecture in NOPE_ARCHITECTURES,
        )
        without = sum(rotary is None for rotary in layers.values())
        logger.info(
            "spans: K of %d attention layers is cached un-rotated (%d without RoPE)",
            len(layers),
            without,
        )
