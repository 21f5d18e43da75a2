"""Entry point ``vllm.stat_logger_plugins``: moves what the scheduler counted onto ``/metrics``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

import vllm_spans
from vllm_spans.config import SpansConfig, spans_enabled

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_spans.metrics.counters import EngineMetrics


class SpansStatLogger(StatLoggerBase):
    """Receives every report of one engine's scheduler. Without spans it does nothing.

    vLLM makes one for each engine in every API server, and sends a report to one API server only.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._metrics: EngineMetrics | None = None
        if not spans_enabled(os.environ):
            return
        import vllm.version

        from vllm_spans.metrics import counters
        from vllm_spans.patches.stock import patch_set_hash

        config = SpansConfig.from_vllm_config(vllm_config)
        model_name = str(vllm_config.model_config.served_model_name)
        self._metrics = counters.EngineMetrics(model_name, engine_index)
        counters.set_build_info(
            model_name=model_name,
            version=vllm_spans.__version__,
            vllm_version=vllm.version.__version__,
            patch_set=patch_set_hash(),
            gap_policy=config.gap_policy,
            gap_length=str(config.gap_length),
            block_size=str(vllm_config.cache_config.block_size),
        )

    def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
        """Take over one report."""
        changes = getattr(scheduler_stats, "spans", None)
        if self._metrics is not None and changes:
            self._metrics.add(changes)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
