"""Prevents: a policy that shuts the picker off from the gateway, its pods or the API server, or leaves all open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.network import allows
from tests.charts.rendering import NAMESPACE, refusal, render
from tests.charts.test_exporter_networkpolicy import ON, OUTSIDE, engine
from tests.charts.test_gateway_inferencepool import IMAGE, pool

GATEWAY = ("gateways", {"app": "proxy"})


def test_it_may_do_its_work(helm: int) -> None:
    rendered = render(ON | pool({"image": IMAGE, "port": 9100}), helm=helm)
    found = rendered.one("NetworkPolicy", "epp")
    assert allows(found, "ingress", GATEWAY, 9100) and allows(found, "ingress", GATEWAY, 9090)
    assert allows(found, "egress", (NAMESPACE, engine(rendered)), 8000)
    assert allows(found, "egress", OUTSIDE, 443)


def test_and_nothing_else(helm: int) -> None:
    found = render(ON | pool(), helm=helm).one("NetworkPolicy", "epp")
    assert not allows(found, "ingress", GATEWAY, 9003)
    assert not allows(found, "egress", (NAMESPACE, {"app": "database"}), 8000)
    assert not allows(found, "egress", OUTSIDE, 80)


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"enabled": False}} | pool(),
        ON,
        ON | pool({"create": False, "service": "their-epp"}),
    ],
    ids=["switched off", "no pool", "another picker"],
)
def test_none_without_its_reason(helm: int, values: dict[str, Any]) -> None:
    assert not render(values, helm=helm).all("NetworkPolicy", "epp")


@pytest.mark.parametrize("key", ["networkPolicy", "egress", "ingress"])
def test_the_picker_has_no_policy_values_of_its_own(helm: int, key: str) -> None:
    assert key in refusal(pool({"image": IMAGE, key: {}}), helm=helm)
