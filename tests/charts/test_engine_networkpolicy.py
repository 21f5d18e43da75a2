"""Prevents: a policy that shuts engines off from their clients, their hub or each other, or leaves all open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.network import allows
from tests.charts.rendering import NAMESPACE, Render, refusal, render
from tests.charts.selecting import pod_labels
from tests.charts.test_exporter_networkpolicy import ON, OUTSIDE
from tests.charts.test_gateway_inferencepool import IMAGE
from tests.charts.test_loadtest_job import load

CLIENT = (NAMESPACE, {"app": "client"})
NAMED = {
    "networkPolicy": {
        "enabled": True,
        "from": [{"podSelector": {"matchLabels": {"app": "client"}}}],
    }
}


def policy(rendered: Render) -> dict[str, Any]:
    return rendered.one("NetworkPolicy", "engine")


def test_pods_of_the_namespace_may_ask_and_others_not(helm: int) -> None:
    found = policy(render(ON, helm=helm))
    assert allows(found, "ingress", CLIENT, 8000)
    assert not allows(found, "ingress", CLIENT, 22)
    assert not allows(found, "ingress", ("other", {"app": "client"}), 8000)


def test_whom_the_values_name_may_ask_and_nobody_else(helm: int) -> None:
    found = policy(render(NAMED, helm=helm))
    assert allows(found, "ingress", CLIENT, 8000)
    assert not allows(found, "ingress", (NAMESPACE, {"app": "stranger"}), 8000)


def test_the_charts_own_parts_always_may(helm: int) -> None:
    pool = {"inferencePool": {"enabled": True, "endpointPicker": {"image": IMAGE}}}
    rendered = render(NAMED | load() | pool, helm=helm)
    found = policy(rendered)
    parts = set()
    for thing in rendered.objects:
        for labels in pod_labels(thing):
            part = labels["app.kubernetes.io/component"]
            parts.add(part)
            assert allows(found, "ingress", (NAMESPACE, labels), 8000) == (part != "engine")
    assert parts == {"engine", "exporter", "epp", "loadtest", "test"}


def test_an_offline_engine_reaches_names_only(helm: int) -> None:
    offline = policy(render(ON | {"model": {"offline": True}}, helm=helm))
    assert allows(offline, "egress", OUTSIDE, 53, "UDP")
    assert not allows(offline, "egress", OUTSIDE, 443)
    download = {"model": {"offline": False}, "engine": {"probes": {"startupSeconds": 1800}}}
    online = policy(render(ON | download, helm=helm))
    assert allows(online, "egress", OUTSIDE, 443) and not allows(online, "egress", OUTSIDE, 80)


def test_further_ways_out_are_those_of_the_values(helm: int) -> None:
    rule = {"ports": [{"port": 9000, "protocol": "TCP"}]}
    values = {"networkPolicy": {"enabled": True, "egress": [rule]}}
    assert allows(policy(render(values, helm=helm)), "egress", OUTSIDE, 9000)


def test_the_pods_of_one_engine_reach_each_other_at_any_port(helm: int) -> None:
    rendered = render(preset="multi-node", helm=helm)
    leader, worker = pod_labels(rendered.one("LeaderWorkerSet"))
    for part, other in (("engine", worker), ("worker", leader)):
        found = rendered.one("NetworkPolicy", part)
        for direction in ("ingress", "egress"):
            assert allows(found, direction, (NAMESPACE, other), 29500)
    assert not allows(rendered.one("NetworkPolicy", "worker"), "ingress", CLIENT, 8000)


def test_none_where_it_is_switched_off(helm: int) -> None:
    assert not render({"networkPolicy": {"enabled": False}}, helm=helm).all("NetworkPolicy")


@pytest.mark.parametrize("values", [{"from": "all"}, {"egress": {}}, {"ingress": []}])
def test_what_is_no_policy_is_refused(helm: int, values: dict[str, Any]) -> None:
    assert next(iter(values)) in refusal({"networkPolicy": {"enabled": True, **values}}, helm=helm)
