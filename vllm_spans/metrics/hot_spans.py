"""``vllm_spans_hot_span_requests``: the spans asked for most, as a set that is replaced as a whole.

A series whose span is no longer among them is gone from the next page on. The files by which several API servers share
their metrics cannot forget a series, so there this metric is left out.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric

from vllm_spans.metrics.stats import HOT_SPANS

logger = logging.getLogger(__name__)

NAME = f"vllm_spans_{HOT_SPANS}"
HELP = "Requests for a span since the engine started, of the spans asked for most; the span by the start of its key."
LABELS = ("model_name", "engine", "span")


class HotSpans:
    """Collector of the metric, for all engines that report to this API server."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], dict[str, int]] = {}

    def replace(self, engine: tuple[str, str], requests: Mapping[str, int]) -> None:
        """Take in an engine's spans, in place of those that it had.

        Args:
            engine: The model's name and the engine's index.
            requests: Requests by span.
        """
        self._requests[engine] = dict(requests)

    def describe(self) -> list[Metric]:
        """The metric without samples."""
        return [GaugeMetricFamily(NAME, HELP, labels=LABELS)]

    def collect(self) -> Iterator[Metric]:
        """The metric as it is now."""
        gauge = GaugeMetricFamily(NAME, HELP, labels=LABELS)
        for engine, requests in list(self._requests.items()):
            for span, number in requests.items():
                gauge.add_metric([*engine, span], number)
        yield gauge


@functools.cache
def exported() -> HotSpans | None:
    """The one collector, registered; ``None`` where several API servers share one page."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        logger.info("%s is not exported by several API servers", NAME)
        return None
    hot = HotSpans()
    REGISTRY.register(hot)
    return hot
