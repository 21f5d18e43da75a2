"""Prevents: a route that no Gateway takes, or that ends long answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import refusal, render
from tests.charts.test_gateway_inferencepool import pool


def route(**values: Any) -> dict[str, Any]:
    return pool(route={"enabled": True, "gateway": {"name": "inference"}, **values})


def test_it_leads_from_the_gateway_to_the_pool(helm: int) -> None:
    rendered = render(route(), helm=helm)
    spec = rendered.one("HTTPRoute")["spec"]
    assert [parent["name"] for parent in spec["parentRefs"]] == ["inference"]
    (rule,) = spec["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["backendRefs"] == [
        {
            "group": "inference.networking.k8s.io",
            "kind": "InferencePool",
            "name": rendered.one("InferencePool")["metadata"]["name"],
        }
    ]


def test_a_long_answer_is_not_cut_off(helm: int) -> None:
    (rule,) = render(route(), helm=helm).one("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}


def test_gateway_hosts_and_path_are_those_of_the_values(helm: int) -> None:
    gateway = {"name": "public", "namespace": "infra", "sectionName": "https"}
    values = route(gateway=gateway, hostnames=["llm.test"], path="/chat", timeout="10m")
    spec = render(values, helm=helm).one("HTTPRoute")["spec"]
    assert gateway.items() <= spec["parentRefs"][0].items()
    assert spec["hostnames"] == ["llm.test"]
    assert spec["rules"][0]["matches"][0]["path"]["value"] == "/chat"
    assert spec["rules"][0]["timeouts"] == {"request": "10m"}


def test_none_without_being_asked_for(helm: int) -> None:
    assert not render(pool(), helm=helm).all("HTTPRoute")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (route(gateway={}), "inferencePool.route.gateway.name is empty"),
        (
            {"inferencePool": {"route": {"enabled": True, "gateway": {"name": "x"}}}},
            "Set inferencePool.enabled",
        ),
        (route(path="chat"), "path"),
        (route(timeout="forever"), "timeout"),
        (route(hostnames="llm.test"), "hostnames"),
        (route(gateway={"name": "x", "port": 80}), "port"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, helm=helm)
