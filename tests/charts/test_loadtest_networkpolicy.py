"""Prevents: a load that a policy shuts off from the servers, or that others may connect to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.network import allows
from tests.charts.rendering import NAMESPACE, refusal, render
from tests.charts.test_exporter_networkpolicy import ON, OUTSIDE, PROMETHEUS, engine
from tests.charts.test_loadtest_job import load


def test_it_may_reach_the_engines_and_nothing_else(helm: int) -> None:
    rendered = render(ON | load(), helm=helm)
    found = rendered.one("NetworkPolicy", "loadtest")
    assert allows(found, "egress", (NAMESPACE, engine(rendered)), 8000)
    assert allows(found, "egress", OUTSIDE, 53, "UDP")
    assert not allows(found, "egress", OUTSIDE, 443)
    assert not allows(found, "egress", (NAMESPACE, {"app": "database"}), 8000)


def test_an_address_of_the_values_can_be_reached(helm: int) -> None:
    rendered = render(ON | load(url="https://gateway.test"), helm=helm)
    found = rendered.one("NetworkPolicy", "loadtest")
    assert allows(found, "egress", OUTSIDE, 443)


@pytest.mark.parametrize("url", ["", "https://gateway.test"])
def test_nobody_connects_to_it(helm: int, url: str) -> None:
    found = render(ON | load(url=url), helm=helm).one("NetworkPolicy", "loadtest")
    assert not allows(found, "ingress", PROMETHEUS, 8089)


@pytest.mark.parametrize("values", [ON, {"networkPolicy": {"enabled": False}} | load()])
def test_none_without_its_reason(helm: int, values: dict[str, Any]) -> None:
    assert not render(values, helm=helm).all("NetworkPolicy", "loadtest")


@pytest.mark.parametrize("key", ["networkPolicy", "egress"])
def test_the_load_has_no_policy_values_of_its_own(helm: int, key: str) -> None:
    assert key in refusal(load(**{key: {}}), helm=helm)
