"""What one pod counted: increments across restarts, and how much of them a sliding window holds. Pure.

When a process's counters are seen for the first time, what they hold already counts as an increment only if the
process is known to have started inside the window and while the exporter watched. A server that ran for days before
the exporter started would otherwise let every ratio jump to the average of those days, and a restart of the exporter
would count all of it again.

A process takes another's place in the same pod, or behind the same address, when it started after the pod was last
read; or, where a page does not say when it started, when a counter fell or the pod's container is another one. All
that the new process holds then counts: it counted it since the last reading.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from vllm_spans.exporter.page import Page, Series

SKEW_SECONDS = 30.0
"""How far the clocks of two machines may be apart."""

WINDOWED = ("lookup_tokens", "reused_tokens", "gap_tokens")


class OlderProcessError(ValueError):
    """An address answers for a process that is older than the one that it answered for before."""


@dataclass(frozen=True)
class Totals:
    """Tokens that ratios are made of."""

    lookup: float = 0.0
    reused: float = 0.0
    gap: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.lookup + other.lookup, self.reused + other.reused, self.gap + other.gap)

    def __sub__(self, other: Totals) -> Totals:
        return Totals(self.lookup - other.lookup, self.reused - other.reused, self.gap - other.gap)

    @classmethod
    def of(cls, increments: dict[Series, float]) -> Totals:
        """Sum increments over their labels."""
        sums = dict.fromkeys(WINDOWED, 0.0)
        for (name, _), value in increments.items():
            if name in sums:
                sums[name] += value
        return cls(*(sums[name] for name in WINDOWED))


class PodHistory:
    """Counters of one pod.

    Args:
        window: Length of the window in seconds.
        watching_since: When the exporter began to watch, in seconds since the epoch.
    """

    def __init__(self, window: float, watching_since: float) -> None:
        self._window = window
        self._watching_since = watching_since
        self._values: dict[Series, float] = {}
        self._read_at: float | None = None
        self._started: float | None = None
        self._incarnation = ""
        self._fell = False
        self._model: str | None = None
        self._sum = Totals()
        self._points: deque[tuple[float, Totals]] = deque()

    @property
    def read_at(self) -> float | None:
        """When it was last read."""
        return self._read_at

    def read(
        self,
        page: Page,
        now: float,
        incarnation: str = "",
        started: float | None = None,
    ) -> dict[Series, float]:
        """Take in a page.

        Args:
            page: What the pod says.
            now: When it said so, in seconds since the epoch.
            incarnation: Whatever changes when the pod's container is restarted.
            started: When the container started, for a page that does not say it.

        Returns:
            Increment of each counter since the last page.

        Raises:
            OlderProcessError: The page is of a process older than that of the last page.
        """
        began = page.started if page.started is not None else started
        if self._read_at is None:
            whole = self._is_new(began, now)
            before = dict.fromkeys(page.counters, 0.0) if whole else page.counters
            if whole:
                base = -math.inf if began is None else min(began, now)
                self._points.append((base, self._sum))
        else:
            before = self._values_before(page, incarnation)
            if page.model != self._model:
                # What the pod counted for its last model is no part of this one's ratios.
                self._points.clear()
                self._points.append((self._read_at, self._sum))
        increments = {
            series: value - before.get(series, 0.0) for series, value in page.counters.items()
        }
        self._values = {**before, **page.counters}
        self._read_at, self._started = now, page.started
        self._incarnation, self._model = incarnation, page.model
        self._sum = self._sum + Totals.of(increments)
        self._points.append((now, self._sum))
        return increments

    def in_window(self, now: float) -> Totals:
        """Increments that took place wholly within the window that ends now."""
        while self._points and self._points[0][0] < now - self._window:
            self._points.popleft()
        return self._sum - self._points[0][1] if self._points else Totals()

    def _is_new(self, began: float | None, now: float) -> bool:
        oldest = max(self._watching_since, now - self._window)
        return (-math.inf if began is None else began) >= oldest

    def _values_before(self, page: Page, incarnation: str) -> dict[Series, float]:
        """What the counters held when this page's process was last read: nothing, if it never was."""
        assert self._read_at is not None
        if page.started is not None and self._started is not None:
            if page.started < self._started:
                raise OlderProcessError(
                    "an older process answers than before: is this the address of several pods?"
                )
            if page.started > self._started:
                if page.started >= self._read_at - SKEW_SECONDS:
                    return {}
                return dict(page.counters)  # it ran beside the other: what it holds is of long ago
            return self._values
        fell = any(
            page.counters[series] < value
            for series, value in self._values.items()
            if series in page.counters
        )
        replaced = incarnation != self._incarnation
        if replaced and self._fell:
            # Kubernetes tells only now of the restart that the counters told of before.
            replaced = False
        self._fell = fell and incarnation == self._incarnation
        # One that fell tells of a restart, after which the others begin at 0 too, however high they are by now.
        return {} if fell or replaced else self._values
