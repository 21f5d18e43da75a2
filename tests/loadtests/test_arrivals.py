"""Prevents a load that is not the one that was asked for, or not the same one twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.arrivals import Bursts, Closed, Constant, OpenLoop, Poisson, Ramp, Recorded

RATES = st.floats(0.1, 50)
LENGTHS = st.floats(0.1, 20)
OPEN = st.one_of(
    st.builds(Constant, RATES, LENGTHS),
    st.builds(Poisson, RATES, LENGTHS),
    st.builds(Bursts, RATES, LENGTHS, st.integers(1, 9)),
    st.builds(Ramp, RATES, RATES, st.integers(1, 5), st.floats(0.1, 5), st.booleans()),
    st.builds(
        Recorded,
        st.lists(st.floats(0, 9), min_size=1).map(lambda times: tuple(sorted(times))),
        st.floats(0.1, 9),
    ),
)


@given(OPEN, st.integers(0, 99))
def test_times_are_in_order_in_their_stage_and_the_same_for_a_seed(
    arrivals: OpenLoop, seed: int
) -> None:
    times = list(arrivals.times(seed))
    stages = arrivals.stages()
    assert times == list(arrivals.times(seed))
    assert [t.at for t in times] == sorted(t.at for t in times)
    assert all(stages[t.stage].begin <= t.at < stages[t.stage].end for t in times)


@pytest.mark.parametrize("arrivals", [Poisson(20, 500), Bursts(20, 500, 5), Ramp(10, 30, 5, 100)])
def test_the_mean_rate_is_the_one_asked_for_and_seeds_differ(arrivals: OpenLoop) -> None:
    counts = [len(list(arrivals.times(seed))) for seed in range(5)]
    assert sum(counts) / 5 == pytest.approx(10_000, rel=0.05)
    assert len({next(arrivals.times(seed)).at for seed in range(5)}) == 5


def test_poisson_gaps_are_exponential() -> None:
    times = [arrival.at for arrival in Poisson(10, 2000).times(0)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.03)
    # Its deviation equals its mean, and e**-1 of all gaps are longer than the mean.
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(g > mean for g in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_constant_times() -> None:
    assert [arrival.at for arrival in Constant(4, 1).times(0)] == [0.0, 0.25, 0.5, 0.75]


def test_bursts_come_together() -> None:
    times = [arrival.at for arrival in Bursts(50, 20, 10).times(1)]
    assert {len(list(group)) for _, group in itertools.groupby(times)} == {10}


def test_a_ramp_steps_through_its_rates() -> None:
    ramp = Ramp(2, 10, 5, 10, even=True)
    assert [stage.rate for stage in ramp.stages()] == [2, 4, 6, 8, 10]
    stages = [arrival.stage for arrival in ramp.times(0)]
    assert [stages.count(stage) for stage in range(5)] == [20, 40, 60, 80, 100]


def test_a_recording_can_be_played_faster() -> None:
    assert [a.at for a in Recorded((0.0, 3.0, 3.0, 6.0), speed=3.0).times(0)] == [
        0.0,
        1.0,
        1.0,
        2.0,
    ]


@given(st.integers(1, 7), st.integers(0, 40))
def test_users_of_a_closed_loop_share_all_sessions(users: int, sessions: int) -> None:
    closed = Closed(users, 60.0, sessions)
    shares = [number for user in range(users) for number in closed.shares(user)]
    assert sorted(shares) == list(range(sessions))


def test_a_closed_loop_can_be_without_end() -> None:
    assert list(itertools.islice(Closed(3, 60.0).shares(1), 3)) == [1, 4, 7]
