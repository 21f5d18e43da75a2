"""Prevents: images without what their users check: labels, a user that is not root, a true bill of materials."""

from __future__ import annotations

import json
from typing import Any

import pytest

from images import versions, wheels
from images.base import KEY_LABEL
from images.build import ALL, SBOM
from images.tools import Tool
from tests.images.containers import inspect, output, tag
from vllm_spans.patches.stock import patch_set_hash

NAMES = sorted(ALL)
ENGINES = [name for name in NAMES if ALL[name].engine]

LISTING = """
import importlib.metadata
for each in importlib.metadata.distributions():
    print(each.metadata["Name"], each.version)
"""


@pytest.mark.parametrize("name", NAMES)
def test_labels_say_what_an_image_is(name: str, built: Tool) -> None:
    labels = built.labels(tag(name))
    assert labels["org.opencontainers.image.title"] == name
    assert labels["org.opencontainers.image.version"] == versions.project()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.description"]
    assert len(labels["org.opencontainers.image.revision"].partition("-")[0]) == 40
    assert labels["vllm-spans.sbom"] == SBOM
    assert labels[KEY_LABEL]


@pytest.mark.parametrize("name", ENGINES)
def test_labels_tell_vllm_and_the_patch_set(name: str, built: Tool) -> None:
    labels = built.labels(tag(name))
    assert labels["vllm-spans.vllm-version"] == versions.vllm() == "0.32.0"
    assert labels["vllm-spans.patch-set"] == patch_set_hash()


@pytest.mark.parametrize("name", NAMES)
def test_the_user_is_a_number_and_signals_reach_it(name: str) -> None:
    """Kubernetes cannot tell whether a user that has a name is root."""
    config = inspect(tag(name))["Config"]
    user, _, group = config["User"].partition(":")
    assert int(user) > 0
    assert int(group) == 0
    assert config["Entrypoint"][:2] == ["tini", "--"]


def bill(name: str) -> dict[str, Any]:
    return json.loads(output(name, "cat", SBOM))


@pytest.mark.parametrize("name", NAMES)
def test_the_bill_lists_what_is_installed(name: str) -> None:
    """Python's and Debian's own tools are asked, in the finished image."""
    components = bill(name)["components"]
    python = "python3" if name == "vllm-spans" else "/opt/vllm-spans/bin/python"
    installed = set(output(name, python, "-c", LISTING).splitlines())
    listed = {
        f"{each['name']} {each['version']}"
        for each in components
        if each.get("purl", "").startswith("pkg:pypi/")
    }
    assert listed == installed
    debian = set(output(name, "dpkg-query", "-W", "-f", "${Package} ${Version}\\n").splitlines())
    listed = {
        f"{each['name']} {each['version']}"
        for each in components
        if each.get("purl", "").startswith("pkg:deb/")
    }
    assert listed == debian
    assert len(debian) > 50


@pytest.mark.parametrize("name", NAMES)
def test_what_is_installed_is_what_is_pinned(name: str) -> None:
    pins = {pin.lower().replace("_", "-") for pin in versions.locked().values()}
    own = {f"vllm-spans=={versions.project()}", f"vllm=={versions.vllm()}+cpu"}
    for each in bill(name)["components"]:
        if each.get("purl", "").startswith("pkg:pypi/"):
            pin = f"{each['name'].lower().replace('_', '-')}=={each['version']}"
            assert pin in pins | own or (name == "vllm-spans" and pin.startswith("pip==")), pin


@pytest.mark.parametrize("name", NAMES)
def test_the_bill_beside_is_the_one_inside(name: str) -> None:
    beside = wheels.folder() / "sbom" / f"{name}-{versions.project()}.cdx.json"
    assert json.loads(beside.read_text(encoding="utf-8")) == bill(name)


def test_the_bill_names_the_model() -> None:
    (model,) = [e for e in bill("vllm-spans-cpu")["components"] if "model" in e["type"]]
    (digest,) = model["hashes"]
    weights = output("vllm-spans-cpu", "sha256sum", "/models/smollm2/model.safetensors")
    assert digest["content"] == weights.split()[0]


@pytest.mark.parametrize("name", ["vllm-spans-cpu", "spans-exporter", "spans-loadtest"])
def test_nothing_is_left_that_only_building_needs(name: str) -> None:
    present = output(
        name, "sh", "-c", "ls -d /opt/vllm-spans/bin/pip* /build /wheels /own 2>&1 || true"
    )
    assert all("No such file" in line for line in present.splitlines()), present
