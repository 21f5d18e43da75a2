"""Prevents: endless series, pods that vanish from the view or stay in it, and ratios made of nothing."""

from __future__ import annotations

from tests.exporter.test_history import GAP, LOOKUP, REUSED, START, WINDOW, page
from vllm_spans.exporter.fleet import UNKNOWN_MODEL, Fleet, Limits
from vllm_spans.exporter.page import Page
from vllm_spans.exporter.status import as_text

LIMITS = Limits(window=WINDOW, hot_spans=3, stale_pods=2, spread_tokens=64)


def fleet_of(*keys: str) -> Fleet:
    fleet = Fleet(START, LIMITS)
    fleet.keep({key: f"ns/{key}" for key in keys}, START)
    return fleet


def test_without_lookups_there_is_no_ratio_rather_than_a_wrong_one() -> None:
    fleet = fleet_of("a")
    assert fleet.view(START).models == {}, "a pod that was not asked yet is in some state"
    fleet.read("a", page(0, started=START), START + 1)
    model = fleet.view(START + 1).models["m"]
    assert (model.reuse_ratio, model.gap_recompute_ratio, model.reuse_ratio_spread) == (None,) * 3
    fleet.read("a", Page("m", START, {LOOKUP: 8.0, REUSED: 0.0, GAP: 4.0}), START + 2)
    model = fleet.view(START + 2).models["m"]
    assert (model.reuse_ratio, model.gap_recompute_ratio) == (0.0, None)


def test_ratios_are_those_of_the_window_and_go_with_it() -> None:
    fleet = fleet_of("a")
    fleet.read("a", page(0, started=START), START + 1)
    fleet.read("a", page(10, started=START), START + 2)
    assert fleet.view(START + 2).models["m"].reuse_ratio == 0.75
    assert fleet.view(START + 3 + WINDOW).models["m"].reuse_ratio is None
    assert fleet.view(START + 3 + WINDOW).models["m"].counters[LOOKUP] == 80


def test_a_pod_that_is_gone_keeps_what_it_counted_and_leaves_the_rest() -> None:
    fleet = fleet_of("a")
    fleet.read("a", page(10, started=START), START + 1)
    fleet.keep({}, START + 2)
    view = fleet.view(START + 2)
    assert view.models["m"].counters[LOOKUP] == 80
    assert view.models["m"].reuse_ratio == 0.75
    assert not any(view.models["m"].pods.values())
    assert not view.stale_pods and view.models["m"].oldest_scrape_age is None
    assert fleet.read("a", page(99, started=START), START + 3) == "ready"
    assert fleet.view(START + 3).models["m"].counters[LOOKUP] == 80, "a late answer counts"
    for later in (3 + WINDOW, 4 + 2 * WINDOW):
        fleet.keep({}, START + later)
    assert fleet._pods == {}, "pods that are gone are kept for ever"
    assert fleet.view(START + 5 + 2 * WINDOW).models["m"].counters[LOOKUP] == 80


def test_a_pod_that_comes_back_is_not_counted_twice() -> None:
    for away in (10.0, 3 * WINDOW):
        fleet = fleet_of("a")
        fleet.read("a", page(10, started=START), START + 1)
        fleet.keep({}, START + 2)
        fleet.keep({}, START + 2 + away)
        fleet.keep({"a": "ns/a"}, START + 3 + away)
        fleet.read("a", page(10, started=START), START + 4 + away)
        assert fleet.view(START + 4 + away).models["m"].counters[LOOKUP] == 80


def test_states_are_counted_by_model_and_a_pod_is_in_one_at_a_time() -> None:
    fleet = fleet_of("a", "b", "c", "d")
    fleet.read("a", page(1, started=START), START + 1)
    fleet.read("b", page(1, started=START), START + 1, ready=False)
    fleet.read("c", Page("m"), START + 1)
    fleet.fail("d", "timeout")
    view = fleet.view(START + 1)
    found = {state: n for state, n in view.models["m"].pods.items() if n}
    assert found == {"ready": 1, "not_ready": 1, "no_spans": 1}
    assert view.models[UNKNOWN_MODEL].pods["timeout"] == 1
    fleet.fail("a", "http_error")
    found = {state: n for state, n in fleet.view(START + 2).models["m"].pods.items() if n}
    assert found == {"http_error": 1, "not_ready": 1, "no_spans": 1}


def test_spread_is_over_pods_with_enough_lookups() -> None:
    fleet = fleet_of("a", "b", "c")
    for key, (lookup, reused) in {"a": (100, 90), "b": (200, 20), "c": (10, 0)}.items():
        counters = {LOOKUP: float(lookup), REUSED: float(reused)}
        fleet.read(key, Page("m", START, counters), START + 1)
    spread = fleet.view(START + 1).models["m"].reuse_ratio_spread
    assert spread is not None and abs(spread - 0.8) < 1e-9
    fleet.keep({"a": "ns/a", "c": "ns/c"}, START + 2)
    assert fleet.view(START + 2).models["m"].reuse_ratio_spread is None


def test_exported_spans_and_pods_are_bounded_and_the_choice_is_steady() -> None:
    keys = [f"p{n}" for n in range(9)]
    fleet = fleet_of(*keys)
    for n, key in enumerate(keys):
        spans = {"shared": 5.0, f"own{n}": 9.0 + n}
        fleet.read(key, Page("m", START, {LOOKUP: 1.0}, spans), START + n / 10)
    view = fleet.view(START + 1)
    assert view.models["m"].hot_spans == [("shared", 45.0), ("own8", 17.0), ("own7", 16.0)]
    assert [pod.pod for pod in view.stale_pods] == ["ns/p0", "ns/p1"]
    fleet.read("p0", Page("m", START, {LOOKUP: 1.0}), START + 2)
    assert [pod.pod for pod in fleet.view(START + 2).stale_pods] == ["ns/p0", "ns/p1"]
    for key in keys[:8]:
        fleet.read(key, Page("m", START, {LOOKUP: 1.0}), START + 50)
    stale = fleet.view(START + 50).stale_pods
    assert stale[0].pod == "ns/p8"
    assert fleet.view(START + 50).models["m"].oldest_scrape_age == stale[0].age
    fleet.keep({}, START + 51)
    assert fleet.view(START + 51).models["m"].hot_spans == []


def test_silent_pods_are_named_and_large_numbers_are_short() -> None:
    fleet = fleet_of("a", "b")
    counters = {LOOKUP: 1234567.0, REUSED: 0.0, ("load_failures", "io"): 1.0}
    for key in "ab":
        fleet.read(key, Page("m", START, counters, {"abc": 12345.0}), START + 1)
    fleet.read("b", Page("m", START, counters), START + 80)
    text = as_text(fleet.view(START + 80), "in the window")
    assert "silent               ns/a 79 s ago\n" in text
    assert "2.5M" in text and "12.3k" in text and "io 2" in text
    assert "gap-recompute ratio  - in the window" in text
    assert as_text(Fleet(START).view(START), "") == "no pod has been found"
