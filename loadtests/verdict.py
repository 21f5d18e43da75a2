"""What a run is worth: its numbers, what is wrong with it, and its exit status."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests import counters
from loadtests.arrivals import Closed
from loadtests.counters import Check
from loadtests.outcome import Outcome
from loadtests.records import Record
from loadtests.runner import Result
from loadtests.summary import Bounds, Slo, generator_faults, summarise


class Status(enum.IntEnum):
    """Exit status of a load test."""

    GOOD = 0
    MISSED = 1  # the objective, a failed request, or counters that disagree
    USAGE = 2
    INVALID = 3  # the generator was the bottleneck or lost a worker
    INTERRUPTED = 130


@dataclass
class Verdict:
    """One server's part of a report.

    Attributes:
        result: The run.
        summary: Its numbers, from ``summarise``.
        checks: What client and server counted; none if the server has no ``/metrics``.
        reuse: Shares of reuse over the whole run.
        invalid: Why its numbers are not the server's.
        missed: What the server did not keep.
    """

    result: Result
    summary: dict[str, Any]
    checks: list[Check]
    reuse: dict[str, float | None]
    invalid: list[str]
    missed: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """Its exit status."""
        if self.result.interrupted:
            return Status.INTERRUPTED
        if self.invalid:
            return Status.INVALID
        return Status.MISSED if self.missed else Status.GOOD


def judge(result: Result, slo: Slo, bounds: Bounds, least_knee: float = 0.0) -> Verdict:
    """Judge a run.

    Args:
        result: The run.
        slo: The objective. Of a ramp, whose last steps are meant to break it, the knee is judged instead.
        bounds: Of the generator.
        least_knee: Least knee of a ramp, in sessions per second.
    """
    records = result.log.records
    arrivals = result.plan.arrivals
    stages = [] if isinstance(arrivals, Closed) else arrivals.stages()
    summary = summarise(records, stages, result.duration, slo)
    checks = counters.reconcile(records, result.before, result.after) if result.after else []
    invalid = generator_faults(records, result.log.health, result.dead_workers, bounds)
    missed = []
    failed = {name: n for name, n in summary["outcomes"].items() if name != Outcome.OK.value}
    if failed:
        missed.append("failed: " + ", ".join(f"{n} {name}" for name, n in failed.items()))
    if not records:
        missed.append("no request was sent")
    if summary["knee"] is not None:
        if summary["knee"] <= 0 or summary["knee"] < least_knee:
            missed.append(f"the knee is at {summary['knee']:g} sessions/s")
    elif records and not summary["goodput"]["met"]:
        missed.append(
            f"{summary['goodput']['share']:.1%} of the requests kept the objective, not {slo.share:.1%}"
        )
    if not failed:
        # A request that failed may or may not have been counted by the server.
        missed += [
            f"{check.what}: the client has {check.client:g}, the server {check.server}"
            for check in checks
            if not check.agrees
        ]
    reuse = counters.reuse(result.before, result.after)
    return Verdict(result, summary, checks, reuse, invalid, missed)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same request at two servers."""

    id: str
    first: Record
    second: Record


def pairs(first: Sequence[Record], second: Sequence[Record]) -> list[Pair]:
    """Requests that both servers answered, in the order of planned times."""
    others = {record.id: record for record in second if record.outcome is Outcome.OK}
    return [
        Pair(record.id, record, others[record.id])
        for record in first
        if record.outcome is Outcome.OK and record.id in others
    ]


def compare(found: Sequence[Pair]) -> dict[str, Any]:
    """Numbers of the pairs.

    ``ttft``, ``tpot`` and ``e2e`` are medians of each pair's first / second: more means that the second is faster.
    ``prompt_tokens_more`` are tokens of the first server's prompts without pads less those of the second's; where spans
    are marked, borders between pieces can make a few tokens' difference.
    """

    def ratio(name: str) -> float | None:
        values = [
            getattr(pair.first, name) / getattr(pair.second, name)
            for pair in found
            if getattr(pair.first, name) and getattr(pair.second, name)
        ]
        return statistics.median(values) if values else None

    differences = [_text_tokens(pair.first) - _text_tokens(pair.second) for pair in found]
    return {
        "pairs": len(found),
        "ttft": ratio("ttft"),
        "tpot": ratio("tpot"),
        "e2e": ratio("e2e"),
        "prompt_tokens_more": {
            "median": statistics.median(differences) if differences else None,
            "max": max(differences, default=None, key=abs),
        },
        "other_answer_lengths": sum(
            pair.first.completion_tokens != pair.second.completion_tokens for pair in found
        ),
    }


def _text_tokens(record: Record) -> int:
    return (record.prompt_tokens or 0) - record.pad_tokens
