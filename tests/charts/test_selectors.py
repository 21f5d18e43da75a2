"""Prevents: an upgrade that fails on an immutable selector, and selectors that choose another part's pods."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.charts.golden import name_of
from tests.charts.rendering import PRESETS, component_of, render
from tests.charts.selecting import pod_labels
from tests.charts.selectors import RELEASED, selector_of, selectors

IDENTITY = {
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
}
WORKLOADS = {"Deployment", "StatefulSet", "Job"}


def test_released_objects_keep_their_selectors() -> None:
    """An object may come or go; one that is released and still there keeps its selector."""
    released = yaml.safe_load(RELEASED.read_text(encoding="utf-8"))["selectors"]
    now = selectors()
    changed = [
        f"{preset} {name}: {selector} became {now[preset][name]}"
        for preset, objects in released.items()
        for name, selector in objects.items()
        if name in now.get(preset, {}) and now[preset][name] != selector
    ]
    assert not changed, "an upgrade would fail:\n" + "\n".join(changed)


def test_every_released_workload_is_still_there() -> None:
    """A renamed Deployment is a new one: both would run, and the new one wait for the old one's GPUs."""
    released = yaml.safe_load(RELEASED.read_text(encoding="utf-8"))["selectors"]
    now = selectors()
    gone = [
        f"{preset} {name}"
        for preset, objects in released.items()
        for name in objects
        if name.partition("/")[0] in WORKLOADS and name not in now.get(preset, {})
    ]
    assert not gone


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_selectors_are_made_of_the_parts_identity_alone(preset: Path) -> None:
    for thing in render(preset=preset).objects:
        selector = selector_of(thing)
        if selector is not None and thing["kind"] != "PersistentVolumeClaim":
            assert selector.keys() == IDENTITY, thing["metadata"]["name"]


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_every_selector_chooses_one_parts_pods(preset: Path) -> None:
    """A Service that chose the exporter's pod too would send it every other request."""
    rendered = render(preset=preset)
    pods = [
        (component_of(thing), labels) for thing in rendered.objects for labels in pod_labels(thing)
    ]
    assert pods
    for thing in rendered.objects:
        selector = selector_of(thing)
        if selector is None or thing["kind"] == "ServiceMonitor":
            continue
        chosen = {part for part, labels in pods if selector.items() <= labels.items()}
        assert len(chosen) == 1, f"{thing['kind']} {thing['metadata']['name']} chooses {chosen}"


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_service_monitor_chooses_a_service(preset: Path) -> None:
    rendered = render(preset=preset)
    for monitor in rendered.all("ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        chosen = [
            service
            for service in rendered.all("Service")
            if selector.items() <= service["metadata"]["labels"].items()
        ]
        assert [component_of(each) for each in chosen] == ["exporter"]


def test_two_releases_in_a_namespace_share_no_pods() -> None:
    first, second = (render(preset=PRESETS[0], release=name) for name in ("one", "two"))
    pods = [labels for thing in first.objects for labels in pod_labels(thing)]
    for thing in second.objects:
        selector = selector_of(thing)
        if selector is not None:
            assert not any(selector.items() <= labels.items() for labels in pods)
