"""The metrics on ``/metrics``, prefix ``vllm_spans_``; docs/metrics.md says what each is for.

They live in the API server's process and carry vLLM's own labels ``model_name`` and ``engine``, so that they can be
set against vLLM's metrics. With several API servers each holds a part of every counter and the page shows the sum.
Every label value that is known beforehand starts at 0, so that rates are defined from the first scrape on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from vllm_spans.core.plan import SegmentKind
from vllm_spans.core.policy import GAP_POLICIES
from vllm_spans.metrics.hot_spans import exported as hot_spans_exported
from vllm_spans.metrics.stats import HOT_SPANS

logger = logging.getLogger(__name__)

LOAD_FAILURES = (
    "vanished",
    "truncated",
    "checksum",
    "header",
    "format",
    "version",
    "model",
    "geometry",
    "dtype",
    "key",
    "permission",
    "io",
    "timeout",
    "copy",
)
STORE_FAILURES = ("no_space", "tier_full", "permission", "vanished", "io")
OUTCOMES = ("warm", "partial", "cold", "gaps_only", "full")
REJECTIONS = (
    "bad_option",
    "delimiter",
    "echo",
    "empty_span",
    "endpoint",
    "engine",
    "offsets",
    "prompt_logprobs",
    "role",
    "template",
    "too_long",
    "too_many_spans",
    "unknown_option",
    "unsupported",
)


@dataclass(frozen=True)
class MetricSpec:
    """One metric: its name without the prefix and ``_total``, its help text, its own label and that label's values."""

    name: str
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


ENGINE_COUNTERS = (
    MetricSpec(
        "lookup_tokens",
        "Span tokens past their gap that were looked up; equals reused plus isolated tokens.",
    ),
    MetricSpec(
        "reused_tokens",
        "Looked-up span tokens whose KV was reused, by tier.",
        "tier",
        ("gpu", "cpu", "file"),
    ),
    MetricSpec("isolated_tokens", "Looked-up span tokens whose KV was computed in isolation."),
    MetricSpec(
        "isolated_head_tokens",
        "Gap tokens computed in isolation too, because a cold block behind them attends to them.",
    ),
    MetricSpec(
        "gap_tokens",
        "Gap tokens recomputed in the request's context, by policy.",
        "policy",
        GAP_POLICIES,
    ),
    MetricSpec("pad_tokens", "Pad tokens in prompts with spans."),
    MetricSpec("prompt_tokens", "Prompt tokens of admitted requests with spans, pads included."),
    MetricSpec(
        "segments",
        "Segments computed before a request continued, by kind.",
        "kind",
        tuple(kind.value for kind in SegmentKind),
    ),
    MetricSpec(
        "requests",
        "Admitted requests with spans: warm (all span tokens reused), partial, cold, gaps_only (nothing past a "
        "gap), full (policy full).",
        "outcome",
        OUTCOMES,
    ),
    MetricSpec(
        "load_failures",
        "Blocks that a tier was thought to hold and could not give, so that they are computed, by reason.",
        "reason",
        LOAD_FAILURES,
    ),
    MetricSpec(
        "declined_loads",
        "Blocks that a tier holds and that were not loaded, since computing them is faster, by tier.",
        "tier",
        ("cpu", "file"),
    ),
    MetricSpec(
        "store_failures", "Blocks that a tier could not take, by reason.", "reason", STORE_FAILURES
    ),
    MetricSpec("stored_blocks", "Blocks that a tier has taken.", "tier", ("cpu", "file")),
)
ENGINE_GAUGES = (
    MetricSpec("cpu_memory_blocks", "Blocks that the tier in CPU memory holds."),
    MetricSpec("cpu_memory_capacity_blocks", "Blocks that the tier in CPU memory has room for."),
)
REJECTED = MetricSpec(
    "rejected", "Requests refused for their spans, by reason.", "reason", REJECTIONS
)
BUILD_INFO = MetricSpec("build_info", "Versions and settings.")
PREFIX = "vllm_spans_"
ENGINE_LABELS = ("model_name", "engine")


class EngineMetrics:
    """The metrics of one engine.

    Args:
        model_name: The name that the engine's model is served under.
        engine: Index of the engine among the data-parallel ones.
    """

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = (model_name, str(engine))
        for spec in (*ENGINE_COUNTERS, *ENGINE_GAUGES):
            for value in spec.values or (None,):
                self._child(spec.name, value)
        for reason in REJECTIONS:
            _metrics()[REJECTED.name].labels(model_name, reason)
        hot_spans_exported()  # the metric's name is on the page from the first scrape on

    def _child(self, name: str, value: str | None) -> Any:
        own = () if value is None else (value,)
        return _metrics()[name].labels(*self._labels, *own)

    def add(self, changes: Mapping[str, int]) -> None:
        """Take over what the scheduler counted (``SpanStats.take``).

        Args:
            changes: ``name`` or ``name/label value`` -> increment of a counter or value of a gauge. What makes no
                sense is logged and left out: a metric never breaks a step.
        """
        hot_spans = {}
        for key, number in changes.items():
            try:
                name, _, value = key.partition("/")
                if name == HOT_SPANS:
                    hot_spans[value] = number
                    continue
                child = self._child(name, value or None)
                if isinstance(_metrics()[name], Gauge):
                    child.set(number)
                else:
                    child.inc(number)
            except Exception as error:
                logger.warning("metric %r with %r is left out: %r", key, number, error)
        hot = hot_spans_exported() if hot_spans else None
        if hot is not None:
            hot_spans.pop("", None)
            hot.replace(self._labels, hot_spans)


def rejected(model_name: str, reason: str) -> None:
    """Count a request that is answered with HTTP 400 because of its spans. It has reached no engine."""
    _metrics()[REJECTED.name].labels(model_name, reason).inc()


def set_build_info(**labels: str) -> None:
    """Export versions and settings as the labels of ``vllm_spans_build_info``."""
    _build_info(tuple(labels)).labels(**labels).set(1)


@functools.cache
def _metrics() -> dict[str, Counter | Gauge]:
    metrics: dict[str, Counter | Gauge] = {}
    for spec in ENGINE_COUNTERS:
        own = [spec.label] if spec.label else []
        metrics[spec.name] = Counter(PREFIX + spec.name, spec.help, [*ENGINE_LABELS, *own])
    for spec in ENGINE_GAUGES:
        # An engine reports to one API server in one step and to another in the next.
        metrics[spec.name] = Gauge(
            PREFIX + spec.name, spec.help, ENGINE_LABELS, multiprocess_mode="mostrecent"
        )
    metrics[REJECTED.name] = Counter(
        PREFIX + REJECTED.name, REJECTED.help, [ENGINE_LABELS[0], str(REJECTED.label)]
    )
    return metrics


@functools.cache
def _build_info(names: tuple[str, ...]) -> Gauge:
    return Gauge(PREFIX + BUILD_INFO.name, BUILD_INFO.help, names, multiprocess_mode="max")
