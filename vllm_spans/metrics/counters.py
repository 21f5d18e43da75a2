"""The counters on ``/metrics``, prefix ``vllm_spans_``.

They live in the API server's process. Every label value that is known beforehand starts at 0, so that rates are
defined from the first scrape on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from vllm_spans.core.plan import SegmentKind
from vllm_spans.core.policy import GAP_POLICIES

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


@dataclass(frozen=True)
class CounterSpec:
    """One counter: its name without the prefix and ``_total``, its help text, its label and that label's values."""

    name: str
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


ENGINE_COUNTERS = (
    CounterSpec(
        "lookup_tokens",
        "Span tokens past their gap that were looked up; equals reused plus isolated tokens.",
    ),
    CounterSpec(
        "reused_tokens",
        "Looked-up span tokens whose KV was reused, by tier.",
        "tier",
        ("gpu", "cpu", "file"),
    ),
    CounterSpec("isolated_tokens", "Looked-up span tokens whose KV was computed in isolation."),
    CounterSpec(
        "isolated_head_tokens",
        "Gap tokens computed in isolation too, because a cold block behind them attends to them.",
    ),
    CounterSpec(
        "gap_tokens",
        "Gap tokens recomputed in the request's context, by policy.",
        "policy",
        GAP_POLICIES,
    ),
    CounterSpec("pad_tokens", "Pad tokens in prompts with spans."),
    CounterSpec(
        "segments",
        "Segments computed before a request continued, by kind.",
        "kind",
        tuple(kind.value for kind in SegmentKind),
    ),
    CounterSpec(
        "requests",
        "Admitted requests with spans: warm (all span tokens reused), partial, cold, gaps_only (nothing past a "
        "gap), full (policy full).",
        "outcome",
        OUTCOMES,
    ),
    CounterSpec(
        "load_failures",
        "Blocks that a tier was thought to hold and could not give, so that they are computed, by reason.",
        "reason",
        LOAD_FAILURES,
    ),
    CounterSpec(
        "declined_loads",
        "Blocks that a tier holds and that were not loaded, since computing them is faster, by tier.",
        "tier",
        ("cpu", "file"),
    ),
    CounterSpec(
        "store_failures", "Blocks that a tier could not take, by reason.", "reason", STORE_FAILURES
    ),
)
REJECTED = CounterSpec("rejected", "Requests refused for their spans, by reason.", "reason")


@functools.cache
def _counters() -> dict[str, Counter]:
    counters = {}
    for spec in (*ENGINE_COUNTERS, REJECTED):
        labels = [spec.label] if spec.label else []
        counter = counters[spec.name] = Counter(f"vllm_spans_{spec.name}", spec.help, labels)
        for value in spec.values:
            counter.labels(value)
    return counters


def add(increments: Mapping[str, int]) -> None:
    """Add what the scheduler counted (``SpanStats.take``).

    Args:
        increments: ``name`` or ``name/label value`` -> increment. A name that is not known is logged and left out:
            a metric never breaks a step.
    """
    counters = _counters()
    for key, increment in increments.items():
        name, _, label = key.partition("/")
        counter = counters.get(name)
        if counter is None or increment < 0:
            logger.warning("metric %r with increment %r is left out", key, increment)
            continue
        (counter.labels(label) if label else counter).inc(increment)


def rejected(reason: str) -> None:
    """Count a request that is answered with HTTP 400 because of its spans."""
    _counters()["rejected"].labels(reason).inc()


def set_build_info(**labels: str) -> None:
    """Export versions and settings as the labels of ``vllm_spans_build_info``."""
    _build_info(tuple(labels)).labels(**labels).set(1)


@functools.cache
def _build_info(names: tuple[str, ...]) -> Gauge:
    return Gauge("vllm_spans_build_info", "Versions and settings.", names, multiprocess_mode="max")
