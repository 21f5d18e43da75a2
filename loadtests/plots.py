"""The report's plots, as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import matplotlib

from loadtests import counters
from loadtests.outcome import Outcome
from loadtests.records import Record
from loadtests.verdict import Verdict

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

_INTERVALS = 60
_COLORS = ("#8c8c8c", "#1f6fb4", "#c0501c", "#2d8a4e")
Values = Callable[[Record], Sequence[float]]


@dataclass(frozen=True)
class Plot:
    """One plot of a report.

    Attributes:
        name: Of its file, without the ending.
        title: Above it.
        svg: The plot.
    """

    name: str
    title: str
    svg: str


def all_plots(verdicts: Sequence[Verdict]) -> Iterator[Plot]:
    """Each plot that there is something to draw for."""
    yield Plot("latency", "Latency", _latencies(verdicts))
    yield Plot("ttft", "Time to first token over the run", _over_time(verdicts))
    if any(verdict.summary["knee"] is not None for verdict in verdicts):
        yield Plot("knee", "Knee", _knee(verdicts))
    if any(_ratios(verdict) for verdict in verdicts):
        yield Plot("reuse", "Reuse over the run, from the servers' counters", _reuse(verdicts))
    yield Plot("delay", "Schedule delay: how late the generator was", _delays(verdicts))


def _good(verdict: Verdict) -> list[Record]:
    return [record for record in verdict.result.log.records if record.outcome is Outcome.OK]


def _latencies(verdicts: Sequence[Verdict]) -> str:
    kinds: list[tuple[str, Values]] = [
        ("time to first token", lambda r: () if r.ttft is None else (r.ttft,)),
        ("inter-token latency", lambda r: r.gaps),
        ("end to end", lambda r: () if r.e2e is None else (r.e2e,)),
    ]
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2))
    for axis, (title, values) in zip(axes, kinds, strict=True):
        for index, verdict in enumerate(verdicts):
            _cdf(axis, [v for r in _good(verdict) for v in values(r)], index, verdict)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("share of requests")
    axes[1].set_ylabel("share of gaps")
    axes[0].legend(fontsize=8)
    return _svg(figure)


def _cdf(axis: Axes, values: list[float], index: int, verdict: Verdict) -> None:
    values = sorted(values)
    shares = [(place + 1) / len(values) for place in range(len(values))]
    axis.step(values, shares, where="post", color=_COLORS[index], label=verdict.result.name)
    if values and values[-1] > 200 * max(values[0], 1e-4):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())


def _over_time(verdicts: Sequence[Verdict]) -> str:
    figure, axis = pyplot.subplots(figsize=(11, 3))
    for index, verdict in enumerate(verdicts):
        found = [(r.planned, r.ttft) for r in _good(verdict) if r.ttft is not None]
        axis.plot(
            [at for at, _ in found],
            [ttft for _, ttft in found],
            ".",
            markersize=4,
            color=_COLORS[index],
            label=verdict.result.name,
        )
    axis.set_xlabel("planned sending, seconds from the start")
    axis.set_ylabel("seconds")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return _svg(figure)


def _knee(verdicts: Sequence[Verdict]) -> str:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.2))
    for index, verdict in enumerate(verdicts):
        stages = [stage for stage in verdict.summary["stages"] if stage["requests"]]
        rates = [stage["rate"] for stage in stages]
        style = {"color": _COLORS[index], "label": verdict.result.name, "marker": "o"}
        left.plot(rates, [stage["share"] for stage in stages], **style)
        right.plot(rates, [stage["ttft"]["p95"] for stage in stages], **style)
        left.axvline(verdict.summary["knee"], color=_COLORS[index], linestyle=":")
    left.set_ylabel("share that kept the objective")
    left.set_ylim(0, 1.05)
    right.set_ylabel("TTFT p95, seconds")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xlabel("sessions/s")
    left.legend(fontsize=8)
    return _svg(figure)


def _ratios(verdict: Verdict) -> list[tuple[float, dict[str, float | None]]]:
    """Shares of reuse in each of at most 60 intervals of the run."""
    samples = verdict.result.samples
    samples = samples[:: max(1, math.ceil(len(samples) / _INTERVALS))]
    found = [
        (after["at"], counters.reuse(before["counters"], after["counters"]))
        for before, after in pairwise(samples)
    ]
    return [(at, shares) for at, shares in found if any(v is not None for v in shares.values())]


def _reuse(verdicts: Sequence[Verdict]) -> str:
    figure, axis = pyplot.subplots(figsize=(11, 3))
    for index, verdict in enumerate(verdicts):
        found = _ratios(verdict)
        for name, title, style in (
            ("span_reuse", "span tokens reused", "-"),
            ("gap_ratio", "gap tokens per reused one", ":"),
            ("prefix_hits", "prompt tokens found in the cache", "--"),
        ):
            points = [(at, value) for at, ratios in found if (value := ratios[name]) is not None]
            if points:
                axis.plot(
                    [at for at, _ in points],
                    [value for _, value in points],
                    style,
                    color=_COLORS[index],
                    label=f"{verdict.result.name}: {title}",
                )
    axis.set_xlabel("seconds from the start")
    axis.set_ylim(0, 1.05)
    axis.legend(fontsize=8)
    return _svg(figure)


def _delays(verdicts: Sequence[Verdict]) -> str:
    figure, axis = pyplot.subplots(figsize=(11, 2.4))
    for index, verdict in enumerate(verdicts):
        found = [(r.planned, r.delay) for r in verdict.result.log.records if r.delay is not None]
        axis.plot(
            [at for at, _ in found],
            [delay * 1000 for _, delay in found],
            ".",
            markersize=3,
            color=_COLORS[index],
            label=verdict.result.name,
        )
    axis.set_xlabel("planned sending, seconds from the start")
    axis.set_ylabel("milliseconds")
    axis.legend(fontsize=8)
    return _svg(figure)


def _svg(figure: pyplot.Figure) -> str:
    figure.tight_layout()
    text = io.StringIO()
    # Without a date and with a fixed salt the same run draws the same file.
    with matplotlib.rc_context({"svg.hashsalt": "loadtests"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    found = text.getvalue()
    return found[found.index("<svg") :]
