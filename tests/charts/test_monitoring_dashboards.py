"""Prevents: dashboards that Grafana's sidecar does not find, or that are not the project's on arrival."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.charts.rendering import ROOT, Render, refusal, render

SOURCES = {
    path.name: json.loads(path.read_text(encoding="utf-8"))
    for path in (ROOT / "monitoring" / "dashboards" / "json").glob("*.json")
}


def dashboards(**values: Any) -> dict[str, Any]:
    return {"monitoring": {"dashboards": {"enabled": True, **values}}}


def maps(rendered: Render) -> list[dict[str, Any]]:
    return [each for each in rendered.all("ConfigMap") if SOURCES.keys() & each["data"].keys()]


def test_each_dashboard_is_a_map_with_the_projects_json(helm: int) -> None:
    found = maps(render(dashboards(), helm=helm))
    assert [len(each["data"]) for each in found] == [1] * len(SOURCES)
    arrived = {name: json.loads(text) for each in found for name, text in each["data"].items()}
    assert arrived == SOURCES


def test_the_sidecar_finds_them(helm: int) -> None:
    for each in maps(render(dashboards(), helm=helm)):
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
    values = dashboards(labels={"dash": "yes"}, annotations={"grafana_folder": "LLM"})
    for each in maps(render(values, helm=helm)):
        assert each["metadata"]["labels"]["dash"] == "yes"
        assert each["metadata"]["annotations"] == {"grafana_folder": "LLM"}


def test_two_releases_have_maps_of_their_own(helm: int) -> None:
    names = [
        {each["metadata"]["name"] for each in maps(render(dashboards(), helm=helm, release=name))}
        for name in ("one", "two", "a-long-name-of-a-release-that-is-nearly-too-long-1")
    ]
    assert all(len(each) == len(SOURCES) for each in names)
    assert not names[0] & names[1]
    assert all(len(name) <= 63 for each in names for name in each)


def test_none_without_being_asked_for(helm: int) -> None:
    assert not maps(render(helm=helm))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"labels": {"grafana_dashboard": 1}}, "labels"),
        ({"annotations": {"grafana_folder": True}}, "annotations"),
        ({"folder": "LLM"}, "folder"),
        ({"enabled": "true"}, "enabled"),
    ],
)
def test_what_is_no_value_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(dashboards(**values), helm=helm)
