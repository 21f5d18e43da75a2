"""The fleet's state: counters, ratios and pods by model, from pages and failures. Pure; times are passed in."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vllm_spans.exporter.history import PodHistory, Totals
from vllm_spans.exporter.page import Page, Series

STATES = (
    "ready",
    "not_ready",
    "unreachable",
    "timeout",
    "invalid",
    "too_large",
    "http_error",
    "no_spans",
)
UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True)
class Limits:
    """What bounds the exported series, and what is too little to judge by.

    Attributes:
        window: Length in seconds of the window that ratios are of.
        hot_spans: Most spans exported for a model.
        stale_pods: Most pods whose scrape age is exported.
        spread_tokens: Looked-up tokens in the window below which a pod's own ratio says nothing.
    """

    window: float = 300.0
    hot_spans: int = 20
    stale_pods: int = 20
    spread_tokens: float = 4096.0


@dataclass
class ModelView:
    """One model's part of the fleet.

    Attributes:
        counters: Sum of the increments of all pods, of those too that are gone.
        pods: Pods by state.
        gap_recompute_ratio: Gap tokens recomputed per span token reused, in the window; ``None`` when none was.
        reuse_ratio: Part of the looked-up span tokens that was reused, in the window; ``None`` when none was looked up.
        reuse_ratio_spread: Highest less lowest reuse ratio of two or more pods with enough lookups.
        oldest_scrape_age: Seconds since the last good page of the pod for which that is longest.
        hot_spans: Spans most asked for and their requests, over the pods that are there, the hottest first.
    """

    counters: dict[Series, float] = field(default_factory=dict)
    pods: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    gap_recompute_ratio: float | None = None
    reuse_ratio: float | None = None
    reuse_ratio_spread: float | None = None
    oldest_scrape_age: float | None = None
    hot_spans: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class StalePod:
    """A pod, and how long ago it gave a good page; since it was first seen, if it never did."""

    model: str
    pod: str
    age: float


@dataclass
class FleetView:
    """All models, and the pods that were silent for longest."""

    models: dict[str, ModelView] = field(default_factory=dict)
    stale_pods: list[StalePod] = field(default_factory=list)


@dataclass
class _Pod:
    name: str
    history: PodHistory
    seen_at: float
    state: str = "unreachable"
    asked: bool = False
    model: str | None = None
    hot_spans: Mapping[str, float] = field(default_factory=dict)
    gone_at: float | None = None


class Fleet:
    """Counters of all pods, summed without jumps.

    Args:
        watching_since: When the exporter began to watch, in seconds since the epoch. ``-inf`` together with an endless
            window counts all that the pods hold: the view of one look.
        limits: Bounds.
    """

    def __init__(self, watching_since: float, limits: Limits | None = None) -> None:
        self._watching_since = watching_since
        self._limits = limits or Limits()
        self._pods: dict[str, _Pod] = {}
        self._counters: dict[str, dict[Series, float]] = {}

    def keep(self, pods: Mapping[str, str], now: float) -> None:
        """Take in which pods there are.

        What a pod counted that is gone stays in the counters, and in the ratios until the window has passed.

        Args:
            pods: Key (a pod's uid, or an address) -> name.
            now: Time in seconds since the epoch.
        """
        for key, name in pods.items():
            pod = self._pods.get(key)
            if pod is None:
                history = PodHistory(self._limits.window, self._watching_since)
                self._pods[key] = _Pod(name, history, now)
            elif pod.gone_at is not None:
                pod.gone_at, pod.seen_at, pod.asked = None, now, False
        for key, pod in list(self._pods.items()):
            if key in pods:
                continue
            if pod.gone_at is None:
                pod.gone_at = now
            elif pod.gone_at < now - self._limits.window:
                del self._pods[key]

    def read(
        self,
        key: str,
        page: Page,
        now: float,
        *,
        ready: bool = True,
        incarnation: str = "",
        started: float | None = None,
    ) -> str:
        """Take in a page of a pod that ``keep`` was told of; one that has gone meanwhile is passed over.

        Args:
            key: The pod's key.
            page: What it said.
            now: When, in seconds since the epoch.
            ready: Whether Kubernetes calls the pod ready.
            incarnation: See ``PodHistory.read``.
            started: See ``PodHistory.read``.

        Returns:
            The pod's state.

        Raises:
            OlderProcessError: See ``PodHistory.read``.
        """
        pod = self._pods.get(key)
        state = "not_ready" if not ready else "ready" if page.has_spans else "no_spans"
        if pod is None or pod.gone_at is not None:
            return state
        increments = pod.history.read(page, now, incarnation, started)
        pod.model, pod.hot_spans = page.model or pod.model, page.hot_spans
        pod.state, pod.asked = state, True
        if page.has_spans:
            sums = self._counters.setdefault(pod.model or UNKNOWN_MODEL, {})
            for series, increment in increments.items():
                sums[series] = sums.get(series, 0.0) + increment
        return state

    def fail(self, key: str, state: str) -> None:
        """Take in that a pod gave no good page.

        Args:
            key: The pod's key.
            state: One of ``STATES``.
        """
        pod = self._pods.get(key)
        if pod is not None:
            pod.state, pod.asked = state, True

    def view(self, now: float) -> FleetView:
        """The fleet as it is now. A pod that has not been asked yet is in no state."""
        view = FleetView()
        sums: dict[str, Totals] = {}
        ratios: dict[str, list[float]] = {}
        hot: dict[str, dict[str, float]] = {}
        ages = []
        for model, counters in self._counters.items():
            view.models[model] = ModelView(counters=dict(counters))
        for pod in self._pods.values():
            model = pod.model or UNKNOWN_MODEL
            total = pod.history.in_window(now)
            sums[model] = sums.get(model, Totals()) + total
            if pod.gone_at is not None or not pod.asked:
                continue
            of_model = view.models.setdefault(model, ModelView())
            of_model.pods[pod.state] += 1
            read_at = pod.history.read_at
            age = max(0.0, now - (pod.seen_at if read_at is None else read_at))
            ages.append(StalePod(model, pod.name, age))
            of_model.oldest_scrape_age = max(of_model.oldest_scrape_age or 0.0, age)
            for span, requests in pod.hot_spans.items():
                of_span = hot.setdefault(model, {})
                of_span[span] = of_span.get(span, 0.0) + requests
            if total.lookup >= self._limits.spread_tokens:
                ratios.setdefault(model, []).append(total.reused / total.lookup)
        for model, of_model in view.models.items():
            total = sums.get(model, Totals())
            of_model.reuse_ratio = total.reused / total.lookup if total.lookup > 0 else None
            of_model.gap_recompute_ratio = total.gap / total.reused if total.reused > 0 else None
            found = ratios.get(model, [])
            of_model.reuse_ratio_spread = max(found) - min(found) if len(found) > 1 else None
            of_model.hot_spans = _hottest(hot.get(model, {}), self._limits.hot_spans)
        view.stale_pods = _stalest(ages, self._limits)
        return view


def _hottest(requests: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    return heapq.nsmallest(most, requests.items(), key=lambda item: (-item[1], item[0]))


def _stalest(pods: Collection[StalePod], limits: Limits) -> list[StalePod]:
    """The pods that were silent for longest; among those that were not, always the same ones.

    Ages are compared in steps of a fifth of the window, so that the choice among pods that answer does not change with
    every scrape, and with it the exported series.
    """
    step = limits.window / 5
    return heapq.nsmallest(
        limits.stale_pods, pods, key=lambda pod: (-(pod.age // step), pod.model, pod.pod)
    )
