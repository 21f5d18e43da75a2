"""Prevents: a dashboard, rule or alert that asks for a metric that no server has, or under a name that Prometheus does
not see; every query is run on a real Prometheus 2.42 after real traffic on real servers."""

from __future__ import annotations

import contextlib

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.monitoring.live import Live, wait_for
from tests.monitoring.queries import (
    QueryOf,
    dashboard_queries,
    fill_in,
    hasten,
    metrics,
    rule_queries,
    without_thresholds,
)

pytestmark = pytest.mark.monitoring

QUERIES = [*dashboard_queries(), *rule_queries("record"), *rule_queries("alert")]
RECORDED = {query.where.partition(": ")[2] for query in rule_queries("record")}
GAP_ALERT = "VllmSpansGapRatioHigh"


def names_on(pages: dict[str, str]) -> set[str]:
    return {
        sample.name
        for page in pages.values()
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def plain(name: str) -> str:
    """A name as both Prometheus 2.x and 3.x have it: ``vllm:x`` may arrive as ``vllm_x``."""
    return name.replace(":", "_") if name.startswith("vllm:") else name


def test_every_metric_in_a_query_is_on_a_page(live: Live) -> None:
    asked = {
        f"{name}, {query.where}": plain(name)
        for query in QUERIES
        for name in metrics(fill_in(query.expr))
        if name not in RECORDED
    }

    def missing() -> list[str]:
        exported = {plain(name) for name in names_on(live.pages())}
        return [where for where, name in asked.items() if name not in exported]

    # The exporter has no ratio before it has seen enough traffic.
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not missing(), "all metrics", 60)
    assert not missing()


def test_names_and_values_arrive_unchanged(live: Live) -> None:
    """Prometheus 2.x asks for OpenMetrics, in which this client writes other names for those with a colon."""
    with live.traffic.paused():
        for server in live.servers:
            server.wait_idle()
        pages = live.pages()
        ours = {name for name in names_on(pages) if name.startswith("vllm_spans")}
        assert len(ours) > 30
        ours -= {name for name in ours if name.endswith("_created")}

        def missing() -> set[str]:
            return ours - set(live.ask("label/__name__/values"))

        # Prometheus scrapes nothing in its first five seconds.
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not missing(), "a scrape of all targets", 30)
        assert not missing()
        samples: dict[tuple[str, ...], float] = {}
        for url in live.urls:
            for family in text_string_to_metric_families(pages[url]):
                for sample in family.samples:
                    if sample.name.startswith("vllm_spans") and sample.name.endswith("_total"):
                        labels = {**sample.labels, "instance": live.instance[url]}
                        samples[key(sample.name, labels)] = sample.value

        def seen() -> dict[tuple[str, ...], float]:
            found = live.query('{__name__=~"vllm_spans.*_total",job="engines"}')
            return {
                key(s["metric"].pop("__name__"), s["metric"]): float(s["value"][1]) for s in found
            }

        wait_for(lambda: seen() == samples, "a scrape of the idle servers", 30)


def key(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    return (name, *(f"{k}={v}" for k, v in sorted(labels.items()) if k != "job"))


def test_counters_are_whole_over_engines_and_api_servers(live: Live) -> None:
    """Two engines behind two API servers, and one with tiers: nothing is counted twice or lost."""
    answers = live.traffic.answers
    kinds = [(url, kind) for url in live.urls for kind in ("spans", "plain", "refused")]
    wait_for(lambda: all(answers[each] for each in kinds), "every kind of request", 60)
    with live.traffic.paused():
        for server in live.servers:
            seen = server.wait_idle()
            assert seen["vllm_spans_requests_total"] == answers[server.url, "spans"]
            assert seen["vllm_spans_rejected_total"] == answers[server.url, "refused"]
            assert seen["vllm_spans_lookup_tokens_total"] == (
                seen["vllm_spans_reused_tokens_total"] + seen["vllm_spans_isolated_tokens_total"]
            )
    by_engine = "sum by (instance, engine) (vllm_spans_requests_total) > 0"
    wait_for(lambda: len(live.query(by_engine)) == 3, "a scrape of all three engines", 30)
    broken = (
        "sum by (instance, engine) (vllm_spans_lookup_tokens_total) != "
        "sum by (instance, engine) (vllm_spans_reused_tokens_total) + "
        "sum by (instance, engine) (vllm_spans_isolated_tokens_total)"
    )
    assert live.query(broken) == []


@pytest.mark.parametrize("query", dashboard_queries(), ids=lambda query: query.where)
def test_every_panel_has_data(live: Live, query: QueryOf) -> None:
    wait_for(lambda: live.query(fill_in(query.expr)), query.expr, 60)


@pytest.mark.parametrize(
    "query", [*rule_queries("record"), *rule_queries("alert")], ids=lambda query: query.where
)
def test_every_rule_has_data(live: Live, query: QueryOf) -> None:
    """Of an alert, all that it compares: one without data could never fire."""
    for part in without_thresholds(query.expr):
        wait_for(lambda part=part: live.query(hasten(part)), part, 60)


def test_rules_are_evaluated_without_error(live: Live) -> None:
    groups = live.ask("rules")["groups"]
    errors = {
        rule["name"]: rule["lastError"]
        for group in groups
        for rule in group["rules"]
        if rule.get("lastError")
    }
    assert len(groups) == 4 and not errors


def test_an_alert_fires_and_ends(live: Live) -> None:
    """Long gaps make the fleet compute more than it reuses; when clients shorten them the alert ends."""
    wait_for(lambda: not live.alerts(GAP_ALERT), "documents that are warm", 60)
    live.traffic.gap_length = 96
    try:
        wait_for(lambda: live.alerts(GAP_ALERT) == ["firing"], "the alert to fire")
    finally:
        live.traffic.gap_length = None
    wait_for(lambda: not live.alerts(GAP_ALERT), "the alert to end")
