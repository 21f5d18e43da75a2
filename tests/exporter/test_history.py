"""Prevents: restarts, new pods and gaps in the scrapes moving a fleet's counters or ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.exporter.fleet import Fleet, Limits
from vllm_spans.exporter.history import SKEW_SECONDS, OlderProcessError, PodHistory, Totals
from vllm_spans.exporter.page import Page, Series

WINDOW = 100.0
LOOKUP: Series = ("lookup_tokens", "")
REUSED: Series = ("reused_tokens", "gpu")
GAP: Series = ("gap_tokens", "legolink")


def page(requests: float, started: float | None = None, model: str | None = "m") -> Page:
    """A pod of which each request looks 8 tokens up, reuses 6 and recomputes 2."""
    counters = {LOOKUP: 8 * requests, REUSED: 6 * requests, GAP: 2 * requests}
    return Page(model, started, counters)


def history(watching_since: float = 1000.0) -> PodHistory:
    return PodHistory(WINDOW, watching_since)


def test_what_an_old_pod_counted_before_is_no_increment() -> None:
    pod = history()
    assert set(pod.read(page(1e9, started=1.0), 1001.0).values()) == {0.0}
    assert pod.in_window(1001.0) == Totals()
    assert pod.read(page(1e9 + 3, started=1.0), 1010.0)[LOOKUP] == 24
    assert pod.in_window(1010.0) == Totals(24, 18, 6)


def test_a_pod_of_unknown_age_is_taken_for_an_old_one() -> None:
    assert history().read(page(5), 1001.0)[LOOKUP] == 0


def test_all_that_a_pod_counted_since_it_started_in_our_time_counts() -> None:
    for began in ({"started": 1005.0}, {}):
        pod = history()
        assert pod.read(page(5, **began), 1010.0, started=1005.0)[LOOKUP] == 40
        assert pod.in_window(1010.0).lookup == 40


def test_a_pod_first_seen_long_after_its_start_is_an_old_one() -> None:
    pod = history()
    assert pod.read(page(5, started=1005.0), 1005.0 + WINDOW + 1)[LOOKUP] == 0


def test_an_endless_window_without_a_beginning_counts_everything() -> None:
    pod = PodHistory(math.inf, -math.inf)
    assert pod.read(page(5), 1010.0)[LOOKUP] == 40
    assert pod.in_window(2000.0) == Totals(40, 30, 10)


def test_a_restart_is_seen_by_the_start_even_when_no_counter_fell() -> None:
    pod = history()
    pod.read(page(10, started=1.0), 1001.0)
    assert pod.read(page(12, started=1002.0), 1010.0)[LOOKUP] == 96


def test_a_restart_is_seen_by_one_counter_that_fell() -> None:
    pod = history()
    pod.read(Page("m", None, {LOOKUP: 80.0, GAP: 2.0}), 1001.0)
    assert pod.read(Page("m", None, {LOOKUP: 8.0, GAP: 5.0}), 1010.0) == {LOOKUP: 8.0, GAP: 5.0}


def test_a_restart_is_seen_by_the_container_and_counted_once() -> None:
    pod = history()
    pod.read(page(10), 1001.0, incarnation="a")
    assert pod.read(page(12), 1010.0, incarnation="b")[LOOKUP] == 96
    pod.read(page(1), 1020.0, incarnation="b")  # another restart, seen by its counters first
    assert pod.read(page(2), 1030.0, incarnation="c")[LOOKUP] == 8
    assert pod.read(page(2), 1040.0, incarnation="d")[LOOKUP] == 16


def test_the_start_goes_before_the_container() -> None:
    pod = history()
    pod.read(page(10, started=1.0), 1001.0, incarnation="a")
    assert pod.read(page(11, started=1.0), 1010.0, incarnation="b")[LOOKUP] == 8


def test_an_address_of_several_pods_is_refused_and_does_not_count_twice() -> None:
    pod = history()
    pod.read(page(1e6, started=100.0), 1001.0)
    assert pod.read(page(2e6, started=200.0), 1010.0)[LOOKUP] == 0
    with pytest.raises(OlderProcessError):
        pod.read(page(1e6, started=100.0), 1020.0)
    assert pod.read(page(2e6 + 1, started=200.0), 1030.0)[LOOKUP] == 8


def test_clocks_may_be_apart() -> None:
    pod = history()
    pod.read(page(10, started=1.0), 1001.0)
    assert pod.read(page(3, started=1001.0 - SKEW_SECONDS), 1040.0)[LOOKUP] == 24


def test_an_increment_longer_than_the_window_is_in_no_ratio() -> None:
    pod = history()
    pod.read(page(10, started=1.0), 1001.0)
    assert pod.read(page(20, started=1.0), 1001.0 + 2 * WINDOW)[LOOKUP] == 80
    assert pod.in_window(1001.0 + 2 * WINDOW) == Totals()


def test_a_counter_missing_from_one_page_keeps_its_value() -> None:
    pod = history()
    pod.read(page(10, started=1.0), 1001.0)
    pod.read(Page("m", 1.0, {LOOKUP: 88.0}), 1002.0)
    assert pod.read(page(11, started=1.0), 1003.0) == {LOOKUP: 0.0, REUSED: 6.0, GAP: 2.0}


def test_another_model_in_the_same_pod_starts_its_own_ratios() -> None:
    pod = history()
    pod.read(page(0, started=1001.0), 1001.0)
    pod.read(page(50, started=1001.0), 1010.0)
    pod.read(page(1, started=1015.0, model="n"), 1020.0)
    assert pod.in_window(1020.0) == Totals(8, 6, 2)


START = 1000.0


@dataclass
class Pod:
    """A pod as it is, and the requests that the fleet has taken in of its present process."""

    started: float
    requests: int = 0
    restarts: int = 0
    taken: int | None = None

    def take(self, now: float) -> int:
        """Requests that the fleet must count when it reads the pod now."""
        known = self.taken
        if known is None:
            known = 0 if self.started >= max(START, now - WINDOW) else self.requests
        self.taken = self.requests
        return self.requests - known


steps = st.lists(
    st.tuples(
        st.sampled_from(["work", "work", "restart", "go", "come", "fail"]),
        st.integers(0, 4),
        st.integers(0, 50),
    ),
    max_size=60,
)


@given(steps=steps, tells_start=st.booleans())
def test_no_course_of_events_moves_a_ratio_or_loses_a_count(
    steps: list[tuple[str, int, int]], tells_start: bool
) -> None:
    """Every pod reuses the same part, so every ratio is that part, whatever happens; and the sums are exact."""
    now, expected, born = START, 0, 0
    fleet = Fleet(now, Limits(window=WINDOW, spread_tokens=1))
    pods = {f"old{n}": Pod(started=1.0, requests=10_000 * n) for n in range(3)}
    failing = ""
    for action, which, number in [("look", 0, 0), *steps]:
        names = sorted(pods)
        name = names[which % len(names)] if names else ""
        if action == "come":
            born += 1
            pods[f"new{born}"] = Pod(started=now)
        elif action == "work" and name:
            pods[name].requests += number
        elif action == "restart" and name:
            pod = pods[name]
            known = None if pod.taken is None else 0
            pods[name] = Pod(now, number, pod.restarts + 1, known)
        elif action == "go" and name:
            del pods[name]
        elif action == "fail":
            failing = name
        now += 7.0
        fleet.keep({key: key for key in pods}, now)
        for key, pod in pods.items():
            if key == failing:
                fleet.fail(key, "timeout")
                continue
            expected += pod.take(now)
            read = page(pod.requests, pod.started if tells_start else None)
            fleet.read(key, read, now, started=pod.started, incarnation=str(pod.restarts))
        model = fleet.view(now).models["m"]
        assert model.counters[LOOKUP] == 8 * expected
        assert model.reuse_ratio in (None, 0.75)
        assert model.gap_recompute_ratio in (None, 2 / 6)
        assert model.reuse_ratio_spread in (None, 0.0)
        assert sum(model.pods.values()) <= len(pods)
