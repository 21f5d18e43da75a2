"""Renders of the chart by the real Helm, each made once in a session."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.tooling import helm as helm_program

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "vllm-spans"
PRESETS = sorted((CHART / "ci").glob("*-values.yaml"))
HELMS = (3, 4)
RELEASE = "demo"
NAMESPACE = "llm"
SMALLEST = "cpu-demo"
"""Preset that is rendered where none is named: the chart's own values lack a model's name."""

BASES = {"kubernetes-1.20": "cpu-demo"}
"""Preset that lies over another one -> that one."""

KUBE_VERSION = "1.37"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Render:
    """What Helm made of the chart.

    Attributes:
        text: Its output, documents of YAML.
        objects: The objects in it.
    """

    text: str
    objects: tuple[dict[str, Any], ...]

    def all(self, kind: str, component: str | None = None) -> list[dict[str, Any]]:
        """Objects of a kind.

        Args:
            kind: For example ``Deployment``.
            component: Label ``app.kubernetes.io/component``, if only one part's are wanted.
        """
        return [
            each
            for each in self.objects
            if each["kind"] == kind and component in (None, component_of(each))
        ]

    def one(self, kind: str, component: str | None = None) -> dict[str, Any]:
        """The object of a kind of which there must be exactly one."""
        found = self.all(kind, component)
        names = [each["metadata"]["name"] for each in found]
        assert len(found) == 1, f"{kind} {component or ''}: {names} of {self.kinds()}"
        return found[0]

    def kinds(self) -> list[str]:
        """Every object's kind, and its component where it has one."""
        return [f"{each['kind']} {component_of(each) or ''}".strip() for each in self.objects]


def component_of(thing: Mapping[str, Any]) -> str | None:
    """An object's label ``app.kubernetes.io/component``."""
    labels = thing["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/component")


def render(
    values: Mapping[str, Any] | None = None,
    *,
    preset: Path | str | None = SMALLEST,
    helm: int = 4,
    kube_version: str = KUBE_VERSION,
    api_versions: Sequence[str] = (),
    release: str = RELEASE,
    upgrade: bool = False,
) -> Render:
    """Render the chart as ``helm template`` does.

    Args:
        values: Over the preset's and the chart's own.
        preset: File of values, or its name without ``-values.yaml``; ``None`` for the chart's own values alone.
        helm: Major version.
        kube_version: That Helm takes the cluster for.
        api_versions: Further ones that the cluster has.
        release: The release's name.
        upgrade: As in an upgrade, not an installation.

    Raises:
        AssertionError: Helm refuses the values; its reason is in the text.
    """
    done = _template(
        json.dumps(values or {}, sort_keys=True), _preset(preset), helm, kube_version,
        tuple(api_versions), release, upgrade,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return _parsed(done.stdout)


def refusal(
    values: Mapping[str, Any], *, preset: Path | str | None = SMALLEST, helm: int = 4, **more: Any
) -> str:
    """Helm's reason for refusing values.

    Args:
        values: As for ``render``.
        preset: As for ``render``.
        helm: As for ``render``.
        more: As for ``render``.

    Raises:
        AssertionError: It takes them.
    """
    done = _template(
        json.dumps(values, sort_keys=True),
        _preset(preset),
        helm,
        more.get("kube_version", KUBE_VERSION),
        tuple(more.get("api_versions", ())),
        more.get("release", RELEASE),
        more.get("upgrade", False),
    )
    assert done.returncode, f"rendered, but should have been refused: {values}"
    return done.stderr


@functools.cache
def notes(preset: str, values: str = "{}") -> str:
    """What Helm 4 prints after an installation; Helm 3 does not say it without a cluster.

    Args:
        preset: Name of a preset.
        values: Over the preset's, as JSON.
    """
    command = [str(helm_program(4)), "install", RELEASE, str(CHART), "--namespace", NAMESPACE]
    command.append("--dry-run=client")
    for path in values_files(_preset(preset)):
        command += ["--values", str(path)]
    command += ["--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


@functools.cache
def _template(
    values: str,
    preset: str,
    helm: int,
    kube_version: str,
    api_versions: tuple[str, ...],
    release: str,
    upgrade: bool,
) -> subprocess.CompletedProcess[str]:
    command = [str(helm_program(helm)), "template", release, str(CHART), "--namespace", NAMESPACE]
    command += ["--kube-version", kube_version]
    for version in api_versions:
        command += ["--api-versions", version]
    if upgrade:
        command.append("--is-upgrade")
    for path in values_files(preset):
        command += ["--values", str(path)]
    # JSON is YAML, and numbers and texts keep their types as they would not with --set.
    command += ["--values", "-"]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False)


@functools.cache
def _parsed(text: str) -> Render:
    documents = yaml.load_all(text, Loader=_Loader)
    return Render(text, tuple(each for each in documents if each))


def _preset(preset: Path | str | None) -> str:
    if preset is None:
        return ""
    path = CHART / "ci" / f"{preset}-values.yaml" if isinstance(preset, str) else preset
    assert path.exists(), f"no preset {path.name}: {[p.name for p in PRESETS]}"
    return str(path)


def values_files(preset: Path | str) -> list[Path]:
    """Files of values that a preset consists of, in order.

    Args:
        preset: Its path; empty for none. Over which other one it lies is in ``BASES``.
    """
    if not preset:
        return []
    path = Path(preset)
    base = BASES.get(path.name.removesuffix("-values.yaml"))
    return [path] if base is None else [path.with_name(f"{base}-values.yaml"), path]
