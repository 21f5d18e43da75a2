"""Prevents: an address that leads nowhere, or to pods that are no engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.engine import container
from tests.charts.rendering import refusal, render


def test_it_leads_to_the_engines_port(helm: int) -> None:
    rendered = render({"service": {"port": 80}}, helm=helm)
    (port,) = rendered.one("Service", "engine")["spec"]["ports"]
    named = {each["name"]: each for each in container(rendered)["ports"]}
    assert (port["name"], port["port"]) == ("http", 80)
    assert named[port["targetPort"]]["containerPort"] == 8000


def test_names_follow_release_and_values(helm: int) -> None:
    def name(values: dict[str, Any], release: str) -> str:
        rendered = render(values, helm=helm, release=release)
        return str(rendered.one("Service", "engine")["metadata"]["name"])

    assert name({}, "chat") == "chat-vllm-spans"
    assert name({}, "vllm-spans") == "vllm-spans"
    assert name({}, "my-vllm-spans-2") == "my-vllm-spans-2"
    assert name({"fullnameOverride": "llm"}, "chat") == "llm"


def test_it_can_be_reached_from_outside_where_asked_for(helm: int) -> None:
    values = {"service": {"type": "NodePort", "nodePort": 30080, "annotations": {"a": "b"}}}
    service = render(values, helm=helm).one("Service", "engine")
    assert service["spec"]["type"] == "NodePort"
    assert service["spec"]["ports"][0]["nodePort"] == 30080
    assert service["metadata"]["annotations"] == {"a": "b"}
    inside = render(helm=helm).one("Service", "engine")["spec"]
    assert inside["type"] == "ClusterIP" and "nodePort" not in inside["ports"][0]


@pytest.mark.parametrize(
    "values",
    [{"type": "External"}, {"port": 0}, {"port": "http"}, {"nodePort": 70000}, {"name": 1}],
)
def test_what_is_no_service_is_refused(helm: int, values: dict[str, Any]) -> None:
    assert next(iter(values)) in refusal({"service": values}, helm=helm)
