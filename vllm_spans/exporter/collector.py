"""The fleet's metrics, written from one view of it at each scrape of the exporter: what is gone is not exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_spans.exporter.fleet import FleetView
from vllm_spans.exporter.page import COUNTERS

FLEET = "vllm_spans_fleet_"
COUNTER_HELP = {
    "lookup_tokens": "Span tokens past their gap that were looked up.",
    "reused_tokens": "Looked-up span tokens whose KV was reused, by tier.",
    "isolated_tokens": "Looked-up span tokens whose KV was computed in isolation.",
    "gap_tokens": "Gap tokens recomputed in their request's context, by policy.",
    "pad_tokens": "Pad tokens in prompts with spans.",
    "requests": "Admitted requests with spans, by outcome.",
    "load_failures": "Blocks that a tier was thought to hold and could not give, by reason.",
    "store_failures": "Blocks that a tier could not take, by reason.",
    "rejected": "Requests refused for their spans, by reason.",
}
GAUGE_HELP = {
    "gap_recompute_ratio": "Gap tokens recomputed per span token reused, in the window; absent when none was reused.",
    "reuse_ratio": "Part of the looked-up span tokens that was reused, in the window; absent when none was looked up.",
    "pods": "Pods by state.",
    "pod_reuse_ratio_spread": "Highest less lowest reuse ratio of the pods with enough lookups in the window.",
    "oldest_scrape_age_seconds": "Longest time that a pod has given no good page.",
    "pod_last_scrape_age_seconds": "Time since a pod's last good page, of the pods for which it is longest.",
    "hot_span_requests": "Requests for a span since each engine started, of the spans asked for most.",
}


class FleetCollector:
    """Writes the fleet's metrics.

    Args:
        view: Gives the fleet as it is now.
    """

    def __init__(self, view: Callable[[], FleetView]) -> None:
        self._view = view

    def describe(self) -> list[Metric]:
        """Nothing ahead of the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The fleet's metrics of this moment."""
        view = self._view()
        for name, label in COUNTERS.items():
            labels = ["model"] if label is None else ["model", label]
            counter = CounterMetricFamily(FLEET + name, COUNTER_HELP[name], labels=labels)
            for model, of_model in sorted(view.models.items()):
                for (series, value), total in sorted(of_model.counters.items()):
                    if series == name:
                        counter.add_metric([model] if label is None else [model, value], total)
            yield counter
        gauges = {
            name: GaugeMetricFamily(FLEET + name, text, labels=_GAUGE_LABELS.get(name, ["model"]))
            for name, text in GAUGE_HELP.items()
        }
        for model, of_model in sorted(view.models.items()):
            for name, ratio in (
                ("gap_recompute_ratio", of_model.gap_recompute_ratio),
                ("reuse_ratio", of_model.reuse_ratio),
                ("pod_reuse_ratio_spread", of_model.reuse_ratio_spread),
                ("oldest_scrape_age_seconds", of_model.oldest_scrape_age),
            ):
                if ratio is not None:
                    gauges[name].add_metric([model], ratio)
            for state, pods in of_model.pods.items():
                gauges["pods"].add_metric([model, state], pods)
            for span, requests in of_model.hot_spans:
                gauges["hot_span_requests"].add_metric([model, span], requests)
        for pod in view.stale_pods:
            gauges["pod_last_scrape_age_seconds"].add_metric([pod.model, pod.pod], pod.age)
        yield from gauges.values()


_GAUGE_LABELS = {
    "pods": ["model", "state"],
    "pod_last_scrape_age_seconds": ["model", "pod"],
    "hot_span_requests": ["model", "span"],
}


class OwnMetrics:
    """What the exporter says of itself.

    Args:
        registry: Where its metrics are registered.
        results: Values of the label ``result`` that are known beforehand.
    """

    def __init__(self, registry: CollectorRegistry, results: tuple[str, ...]) -> None:
        prefix = "vllm_spans_exporter_"
        self.scrapes = Counter(
            prefix + "scrapes", "Scrapes of pods by result.", ["result"], registry=registry
        )
        for result in results:
            self.scrapes.labels(result)
        self.scrape_seconds = Histogram(
            prefix + "scrape_seconds",
            "Time that one scrape of a pod took.",
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self.last_cycle_seconds = Gauge(
            prefix + "last_cycle_seconds",
            "Time from the start of the last finished cycle to the end of its last scrape.",
            registry=registry,
        )
        self.watch_events = Counter(
            prefix + "watch_events", "Changes that Kubernetes told of.", ["type"], registry=registry
        )
        self.watch_failures = Counter(
            prefix + "watch_failures",
            "Failures to list or to watch pods, by reason.",
            ["reason"],
            registry=registry,
        )

    def watch(self, registry: CollectorRegistry, connected: Callable[[], bool]) -> None:
        """Export whether pods are being watched; without Kubernetes there is nothing to say."""
        gauge = Gauge(
            "vllm_spans_exporter_watch_connected",
            "1 while changes to pods arrive, 0 while the pods known last are used.",
            registry=registry,
        )
        gauge.set_function(lambda: float(connected()))
