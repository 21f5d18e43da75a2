"""Prevents: a policy that shuts the exporter off from its pods, the API server or Prometheus, or leaves all open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.network import allows
from tests.charts.rendering import NAMESPACE, Render, refusal, render
from tests.charts.selecting import pod_labels

ON: dict[str, Any] = {"networkPolicy": {"enabled": True}}
PROMETHEUS = ("monitoring", {"app": "prometheus"})
OUTSIDE: tuple[str, dict[str, str]] = ("", {})


def policy(rendered: Render) -> dict[str, Any]:
    return rendered.one("NetworkPolicy", "exporter")


def engine(rendered: Render) -> dict[str, str]:
    (labels,) = pod_labels(rendered.one("Deployment", "engine"))
    return labels


def test_it_may_do_its_work(helm: int) -> None:
    rendered = render(ON, helm=helm)
    found = policy(rendered)
    assert allows(found, "ingress", PROMETHEUS, 9405)
    assert allows(found, "egress", (NAMESPACE, engine(rendered)), 8000)
    assert allows(found, "egress", OUTSIDE, 443) and allows(found, "egress", OUTSIDE, 6443)
    assert allows(found, "egress", ("kube-system", {"k8s-app": "kube-dns"}), 53, "UDP")


def test_and_nothing_else(helm: int) -> None:
    rendered = render(ON, helm=helm)
    found = policy(rendered)
    assert not allows(found, "ingress", PROMETHEUS, 8000)
    assert not allows(found, "egress", (NAMESPACE, {"app": "database"}), 8000)
    assert not allows(found, "egress", ("other", engine(rendered)), 8000)
    assert not allows(found, "egress", OUTSIDE, 80)


@pytest.mark.parametrize(
    "values", [{"namespaces": ["chat"]}, {"allNamespaces": True}, {"selector": "tier=chat"}]
)
def test_pods_of_other_releases_can_be_read(helm: int, values: dict[str, Any]) -> None:
    found = policy(render(ON | {"exporter": values}, helm=helm))
    assert allows(found, "egress", ("chat", {"tier": "chat"}), 9000)
    assert not allows(found, "egress", OUTSIDE, 80)


def test_it_is_of_the_exporters_pod(helm: int) -> None:
    rendered = render(ON, helm=helm)
    wanted = policy(rendered)["spec"]["podSelector"]["matchLabels"].items()
    owners = [
        each["metadata"]["name"]
        for each in rendered.objects
        for labels in pod_labels(each)
        if wanted <= labels.items()
    ]
    assert owners == [rendered.one("Deployment", "exporter")["metadata"]["name"]]


@pytest.mark.parametrize(
    "values", [{"networkPolicy": {"enabled": False}}, ON | {"exporter": {"enabled": False}}]
)
def test_none_where_it_is_switched_off(helm: int, values: dict[str, Any]) -> None:
    assert not render(values, helm=helm).all("NetworkPolicy", "exporter")


@pytest.mark.parametrize("key", ["networkPolicy", "egress"])
def test_the_exporter_has_no_policy_values_of_its_own(helm: int, key: str) -> None:
    assert key in refusal({"exporter": {key: {}}}, helm=helm)
