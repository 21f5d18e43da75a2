"""Prevents: a picker's configuration that differs from the values, or names plugins that it does not list."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.charts.rendering import refusal, render
from tests.charts.test_gateway_inferencepool import IMAGE, pool

MINE = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "prefix-cache-scorer", "parameters": {"maxPrefixBlocksToMatch": 1048576}}],
    "schedulingProfiles": [{"name": "p", "plugins": [{"pluginRef": "prefix-cache-scorer"}]}],
}


def configuration(helm: int, **values: Any) -> dict[str, Any]:
    rendered = render(pool({"image": IMAGE, **values}), helm=helm)
    (text,) = rendered.one("ConfigMap", "epp")["data"].values()
    return yaml.safe_load(text)


def test_the_default_is_whole(helm: int) -> None:
    found = configuration(helm)
    assert found["kind"] == "EndpointPickerConfig"
    listed = {plugin["type"] for plugin in found["plugins"]}
    for profile in found["schedulingProfiles"]:
        assert {each["pluginRef"] for each in profile["plugins"]} <= listed


def test_that_of_the_values_arrives_as_it_is(helm: int) -> None:
    """A map is merged key by key and a list replaced, and a great number stays a whole one."""
    assert configuration(helm, config=MINE) == MINE
    rendered = render(pool({"image": IMAGE, "config": MINE}), helm=helm)
    assert "1048576" in rendered.one("ConfigMap", "epp")["data"]["config.yaml"]


def test_none_where_another_picker_is_named(helm: int) -> None:
    values = pool({"create": False, "service": "their-epp"})
    assert not render(values, helm=helm).all("ConfigMap", "epp")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"plugins": None}, "plugins"),
        ({"schedulingProfiles": []}, "schedulingProfiles"),
        ({"plugins": []}, "plugins"),
        ({"kind": "ConfigMap"}, "kind"),
    ],
)
def test_half_a_configuration_is_refused(helm: int, config: dict[str, Any], says: str) -> None:
    assert says in refusal(pool({"image": IMAGE, "config": config}), helm=helm)
