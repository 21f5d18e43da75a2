"""Prevents: rules in the cluster that are not those that were tested, above all braces that Helm took for its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.charts.rendering import ROOT, refusal, render

SOURCES = sorted((ROOT / "monitoring" / "rules").glob("*.yaml"))


def rules(**values: Any) -> dict[str, Any]:
    return {"monitoring": {"rules": {"enabled": True, **values}}}


def source_groups() -> list[dict[str, Any]]:
    return [
        group for path in SOURCES for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    ]


def groups(helm: int, **values: Any) -> list[dict[str, Any]]:
    return render(rules(**values), helm=helm).one("PrometheusRule")["spec"]["groups"]


def alerts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for group in found for rule in group["rules"] if "alert" in rule]


def test_the_rules_are_the_tested_ones(helm: int) -> None:
    """`make test-monitoring` tries those on a real Prometheus."""
    found = groups(helm)
    assert found == source_groups()
    assert any("{{ $labels.model }}" in each["annotations"]["summary"] for each in alerts(found))


def test_an_alert_can_be_left_out_and_its_group_with_its_last(helm: int) -> None:
    tiers = next(group for group in source_groups() if group["name"] == "vllm-spans-tiers")
    names = [rule["alert"] for rule in tiers["rules"]]
    found = groups(helm, disabled=[*names, "VllmSpansNotUsed"])
    assert "vllm-spans-tiers" not in [group["name"] for group in found]
    kept = {rule["alert"] for rule in alerts(source_groups())} - {*names, "VllmSpansNotUsed"}
    assert {rule["alert"] for rule in alerts(found)} == kept


def test_alerts_get_labels_and_a_runbook_and_nothing_else_changes(helm: int) -> None:
    found = groups(helm, alertLabels={"team": "ml"}, runbook="https://docs.test/runbook.md")
    expected = copy.deepcopy(source_groups())
    for rule in alerts(expected):
        rule["labels"]["team"] = "ml"
        page = rule["annotations"]["runbook_url"].removeprefix("docs/runbook.md")
        rule["annotations"]["runbook_url"] = f"https://docs.test/runbook.md{page}"
    assert found == expected


def test_an_alerts_own_label_gives_way_to_the_values(helm: int) -> None:
    found = alerts(groups(helm, alertLabels={"severity": "page"}))
    assert {rule["labels"]["severity"] for rule in found} == {"page"}


def test_prometheus_finds_them_by_labels_of_the_values(helm: int) -> None:
    found = render(rules(labels={"release": "prom"}), helm=helm).one("PrometheusRule")
    assert found["metadata"]["labels"]["release"] == "prom"


def test_none_without_being_asked_for(helm: int) -> None:
    assert not render(helm=helm).all("PrometheusRule")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"disabled": ["VllmSpansNoPod"]},
            "there is no alert VllmSpansNoPod. The alerts are: Vllm",
        ),
        ({"disabled": "VllmSpansNoPods"}, "disabled"),
        ({"alertLabels": {"team-name": "ml"}}, "alertLabels"),
        ({"alertLabels": {"team": 7}}, "alertLabels"),
        ({"runbook": 7}, "runbook"),
        ({"label": {}}, "label"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(rules(**values), helm=helm)


def test_there_has_to_be_an_exporter(helm: int) -> None:
    values = rules() | {"exporter": {"enabled": False}}
    assert "monitoring.rules are over the exporter's metrics" in refusal(values, helm=helm)
