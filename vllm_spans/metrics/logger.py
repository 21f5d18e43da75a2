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


class SpansStatLogger(StatLoggerBase):
    """Receives every report of one engine's scheduler. Without spans it does nothing."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._enabled = spans_enabled(os.environ)
        if not self._enabled:
            return
        import vllm.version

        from vllm_spans.metrics import counters

        config = SpansConfig.from_vllm_config(vllm_config)
        counters.add({})
        counters.set_build_info(
            version=vllm_spans.__version__,
            vllm_version=vllm.version.__version__,
            gap_policy=config.gap_policy,
            gap_length=str(config.gap_length),
            block_size=str(vllm_config.cache_config.block_size),
        )

    def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
        """Add the increments of one report."""
        if not self._enabled or scheduler_stats is None:
            return
        increments = getattr(scheduler_stats, "spans", None)
        if increments:
            from vllm_spans.metrics import counters

            counters.add(increments)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
