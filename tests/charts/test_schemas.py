"""Prevents: objects that a Kubernetes between 1.25 and 1.37 refuses, or quietly drops a field of."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.golden import name_of
from tests.charts.rendering import HELMS, NAMESPACE, PRESETS, component_of, render
from tests.charts.selecting import pod_specs
from tests.charts.validation import CUSTOM_KINDS, VERSIONS, problems

COMPONENTS = {"engine", "worker", "exporter", "epp", "loadtest", "test"}
NOT_NAMESPACED = {"ClusterRole", "ClusterRoleBinding"}
DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "engine"},
    "spec": {
        "selector": {"matchLabels": {"a": "b"}},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "engine", "image": "engine:1"}]},
        },
    },
}


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_preset_is_valid_on_every_version(preset: Path) -> None:
    """Each version renders for itself, since a template may ask what the cluster has."""
    found = {}
    for version in VERSIONS:
        rendered = render(preset=preset, kube_version=version)
        found.update(dict.fromkeys(problems(rendered.objects, [version])))
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_preset_has_no_slip_that_schemas_let_through(preset: Path, helm: int) -> None:
    """Schemas take null anywhere, and know neither Go's error texts nor numbers that were made text as floats."""
    rendered = render(preset=preset, helm=helm)
    for slip in (r"%!\w*\(", r"<no value>", r"<nil>", r"\d[eE]\+\d", r"map\["):
        assert not re.search(slip, _without_files(rendered.text)), slip
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered.objects]
    assert len(names) == len(set(names)), names
    for each in rendered.objects:
        where = f"{each['kind']} {each['metadata']['name']}"
        assert list(_nulls(each)) == [], where
        assert len(each["metadata"]["name"]) <= 63, where
        if each["kind"] not in NOT_NAMESPACED:
            assert each["metadata"]["namespace"] == NAMESPACE, where
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "vllm-spans", where
        assert {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by"} <= labels.keys(), (
            where
        )
        assert "helm.sh/chart" in labels, where
        assert component_of(each) in COMPONENTS, where


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_every_port_names_its_protocol(preset: Path) -> None:
    """It is a part of the key that ports are merged by, and old API servers do not fill it in when they merge."""
    for thing in render(preset=preset).objects:
        ports = list(thing["spec"]["ports"]) if thing["kind"] == "Service" else []
        for spec in pod_specs(thing):
            ports += [port for each in spec["containers"] for port in each.get("ports", [])]
        assert all("protocol" in port for port in ports), thing["metadata"]["name"]


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_no_pod_gets_variables_of_the_namespaces_services(preset: Path) -> None:
    """A Service named `vllm` would set VLLM_PORT, which an engine takes for its own setting."""
    for thing in render(preset=preset).objects:
        for spec in pod_specs(thing):
            assert spec["enableServiceLinks"] is False, thing["metadata"]["name"]


def _without_files(text: str) -> str:
    """The render without the texts of files, which may hold anything."""
    kept = [each for each in yaml.safe_load_all(text) if each and each["kind"] != "ConfigMap"]
    return yaml.safe_dump_all(kept)


def _nulls(value: Any, path: str = "") -> list[str]:
    """Paths of what is null."""
    if value is None:
        return [path]
    if isinstance(value, dict):
        children = list(value.items())
    else:
        children = list(enumerate(value)) if isinstance(value, list) else []
    return [found for name, each in children for found in _nulls(each, f"{path}.{name}")]


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """The deployment above with one thing set."""
    thing = copy.deepcopy(DEPLOYMENT)
    inner: Any = thing
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return thing


CONTAINER = ["spec", "template", "spec", "containers", 0]


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (changed(["spec", "replica"], 1), "replica"),
        (changed(["spec", "replicas"], "1"), "spec.replicas"),
        (changed([*CONTAINER, "image"], 3), "image"),
        (changed([*CONTAINER, "securityContext"], {"privilege": True}), "privilege"),
        (changed(["apiVersion"], "apps/v1beta1"), "apps/v1beta1 Deployment is unknown"),
        (changed(["kind"], "Deploy"), "apps/v1 Deploy is unknown"),
        (
            {
                "apiVersion": "policy/v1beta1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": "x"},
            },
            "policy/v1beta1 PodDisruptionBudget is unknown",
        ),
        (
            {"apiVersion": "monitoring.coreos.com/v1", "kind": "Probe", "metadata": {"name": "x"}},
            "monitoring.coreos.com/v1 Probe is unknown",
        ),
    ],
)
def test_the_check_finds_what_is_wrong_on_every_version(thing: dict[str, Any], says: str) -> None:
    """A checker that lets these through would pass every chart."""
    found = problems([DEPLOYMENT, thing])
    assert {version for version, _, _ in found} == set(VERSIONS)
    assert all(says in text for _, _, text in found), found


def test_the_check_knows_from_which_version_on_a_field_is_there() -> None:
    """A restartable init container came with 1.28; before, its restartPolicy is an unknown field."""
    sidecar = {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}
    thing = changed(["spec", "template", "spec", "initContainers"], [sidecar])
    assert {version for version, _, _ in problems([thing])} == {"1.25", "1.26", "1.27"}


def test_custom_resources_are_checked_too() -> None:
    """Each kind that the presets make, with a field that does not exist, and without its spec."""
    made = {}
    for preset in PRESETS:
        for each in render(preset=preset).objects:
            made.setdefault(f"{each['apiVersion']} {each['kind']}", each)
    assert set(made) >= CUSTOM_KINDS, f"no preset makes {CUSTOM_KINDS - set(made)}"
    for kind in CUSTOM_KINDS:
        wrong = copy.deepcopy(made[kind])
        wrong["spec"]["replica"] = 1
        assert any("replica" in text for _, _, text in problems([wrong])), kind
        del wrong["spec"]
        assert any("'spec' is a required" in text for _, _, text in problems([wrong])), kind
