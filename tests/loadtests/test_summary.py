"""Prevents numbers that flatter: failures left out of the goodput, a knee behind a step that broke, and so on."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.arrivals import Stage
from loadtests.outcome import Outcome
from loadtests.records import Record
from loadtests.summary import Bounds, Slo, generator_faults, knee, quantile, summarise

VALUES = st.lists(st.floats(0, 100), min_size=1, max_size=50)


def record(number: int = 0, **changes: object) -> Record:
    settings = {"sent": 0.0, "ttft": 1.0, "e2e": 2.0, "completion_tokens": 5, **changes}
    base = Record(number, 0, 0, 0.0, Outcome.OK)
    return dataclasses.replace(base, **settings)  # type: ignore[arg-type]


@given(VALUES, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_a_value_that_the_share_does_not_exceed(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


@given(VALUES)
def test_the_middle_is_the_low_median(values: list[float]) -> None:
    assert quantile(values, 0.5) == statistics.median_low(values)


@given(st.lists(st.sampled_from(list(Outcome)), max_size=20))
def test_goodput_is_of_all_requests(outcomes: list[Outcome]) -> None:
    records = [record(i, outcome=outcome) for i, outcome in enumerate(outcomes)]
    found = summarise(records, [], 10.0, Slo())
    good = outcomes.count(Outcome.OK)
    assert found["goodput"]["kept"] == good
    assert found["goodput"]["share"] == (good / len(records) if records else None)
    assert found["goodput"]["met"] == (bool(records) and good == len(records))
    assert found["failed"] == len(records) - good == sum(found["outcomes"].values()) - good
    assert found["output_tokens"] == 5 * good
    assert found["ttft"]["count"] == good


@pytest.mark.parametrize("bound", ["ttft", "tpot", "e2e"])
def test_each_bound_counts(bound: str) -> None:
    slo = Slo(**{bound: 3.0})
    assert slo.is_met_by(record(**{bound: 3.0}))
    assert not slo.is_met_by(record(**{bound: 3.01}))
    assert not slo.is_met_by(record(**{bound: 1.0}, outcome=Outcome.NO_DONE))


def test_the_share_of_the_objective() -> None:
    records = [record(i, ttft=9.0 if i == 0 else 1.0) for i in range(100)]
    assert summarise(records, [], 1.0, Slo(ttft=5.0, share=0.99))["goodput"]["met"]
    assert not summarise(records, [], 1.0, Slo(ttft=5.0, share=0.995))["goodput"]["met"]


def test_the_knee_is_before_the_first_step_that_breaks() -> None:
    stages = [Stage(10.0 * i, 10.0 * (i + 1), float(i + 1)) for i in range(4)]

    def run(slow: set[int]) -> float | None:
        records = [
            record(i, stage=i // 10, ttft=9.0 if i // 10 in slow else 1.0) for i in range(40)
        ]
        return knee(records, stages, Slo(ttft=5.0))

    assert [run(slow) for slow in (set(), {3}, {2}, {1, 3}, {0})] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert knee([record()], stages[:1], Slo()) is None


def line(worker: int = 0, lag: float = 0.001, cpu: float = 0.2) -> dict[str, float]:
    return {"worker": worker, "at": 1.0, "lag": lag, "cpu": cpu}


def test_a_generator_in_time_has_no_fault() -> None:
    assert generator_faults([record(sent=0.01)], [line(), line(1)], [], Bounds()) == []


def test_each_fault_of_the_generator_is_named() -> None:
    late = [record(i, sent=1.0 if i < 2 else 0.0) for i in range(100)]
    assert "late" in generator_faults(late, [], [], Bounds())[0]
    once = [record(i, sent=1.0 if i < 1 else 0.0) for i in range(100)]
    assert generator_faults(once, [], [], Bounds()) == []
    assert (
        "worker 1: its timer" in generator_faults([], [line(), line(1, lag=1.0)], [], Bounds())[0]
    )
    assert "worker 1 used 95%" in generator_faults([], [line(), line(1, cpu=0.95)], [], Bounds())[0]
    assert generator_faults([], [], [3], Bounds()) == ["worker 3 died"]
