"""Prevents: a pool of no pods, of other parts' pods, or without a picker: gateways then answer 503."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import refusal, render
from tests.charts.selecting import pod_labels

IMAGE = {"repository": "llm-d/llm-d-inference-scheduler", "tag": "v0.8.0"}


def pool(picker: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """Values with a pool whose picker has an image."""
    return {
        "inferencePool": {
            "enabled": True,
            "endpointPicker": {"image": IMAGE} if picker is None else picker,
            **values,
        }
    }


def test_its_members_are_the_engine_pods_at_their_port(helm: int) -> None:
    rendered = render(pool(), helm=helm)
    spec = rendered.one("InferencePool")["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    members = [
        thing
        for thing in rendered.objects
        for labels in pod_labels(thing)
        if wanted <= labels.items()
    ]
    (engine,) = members
    assert engine["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"
    containers = engine["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port for each in containers for port in each.get("ports", [])}
    assert spec["targetPorts"] == [{"number": ports["http"]["containerPort"]}]


def test_its_picker_is_a_service_that_is_installed(helm: int) -> None:
    rendered = render(pool({"image": IMAGE, "port": 9100}), helm=helm)
    reference = rendered.one("InferencePool")["spec"]["endpointPickerRef"]
    service = rendered.one("Service", "epp")
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] == 9100
    assert 9100 in [port["port"] for port in service["spec"]["ports"]]


def test_an_existing_picker_is_named_and_none_installed(helm: int) -> None:
    picker = {"create": False, "service": "their-epp", "port": 9002}
    rendered = render(pool(picker, failureMode="FailClose"), helm=helm)
    reference = rendered.one("InferencePool")["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["failureMode"]) == ("their-epp", "FailClose")
    assert "epp" not in " ".join(rendered.kinds())


def test_none_without_being_asked_for(helm: int) -> None:
    rendered = render(helm=helm)
    assert not rendered.all("InferencePool")
    assert "epp" not in " ".join(rendered.kinds())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (pool({}), "inferencePool.endpointPicker.image.repository is empty"),
        (pool({"image": {"repository": "epp"}}), "image has neither tag nor digest"),
        (pool({"create": False}), "inferencePool.endpointPicker.service is empty"),
        (pool(failureMode="Fail"), "failureMode"),
        (pool({"image": IMAGE, "port": 0}), "port"),
        (pool({"image": IMAGE, "replicas": 2}), "replicas"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, helm=helm)
