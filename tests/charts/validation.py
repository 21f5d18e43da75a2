"""Offline checks of rendered objects, for a range of Kubernetes versions.

Built-in kinds go through the schemas of ``kubernetes-validate``, strictly: a field that a version does not know is an
error, and so is a kind. Custom resources go through ``custom_resources.yaml``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.charts.rendering import ROOT
from tests.tooling import environment

VERSIONS = tuple(f"1.{minor}" for minor in range(25, 38))
_CUSTOM = yaml.safe_load((Path(__file__).with_name("custom_resources.yaml")).read_text())
CUSTOM_KINDS = frozenset(_CUSTOM["kinds"])

_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "namespace", "labels"],
    "properties": {
        "name": {"$ref": "#/definitions/name"},
        "namespace": {"$ref": "#/definitions/name"},
        "labels": {"$ref": "#/definitions/labels"},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def problems(
    objects: Iterable[dict[str, Any]], versions: Sequence[str] = VERSIONS
) -> list[tuple[str, str, str]]:
    """What is wrong with objects.

    Args:
        objects: As rendered.
        versions: Of Kubernetes.

    Returns:
        Version, object and problem. Custom resources have the version ``-``.
    """
    builtin = []
    found = []
    for thing in objects:
        key = f"{thing['apiVersion']} {thing['kind']}"
        if key in CUSTOM_KINDS:
            found += [("-", name_of(thing), text) for text in _custom(key, thing)]
            builtin += _pod_templates(key, thing)
        else:
            builtin.append(thing)
    return found + _builtin(builtin, versions)


def name_of(thing: dict[str, Any]) -> str:
    """Kind and name of an object."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def _custom(key: str, thing: dict[str, Any]) -> list[str]:
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {},
            "kind": {},
            "metadata": _METADATA,
            "spec": _CUSTOM["kinds"][key]["spec"],
        },
        "definitions": _CUSTOM["definitions"],
    }
    return [
        f"{'.'.join(map(str, error.path)) or '(object)'}: {error.message[:300]}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(thing)
    ]


def _pod_templates(key: str, thing: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates in a custom resource, each as an object that Kubernetes knows."""
    found = []
    for path in _CUSTOM["kinds"][key].get("podTemplates", ()):
        template: Any = thing
        for name in path:
            template = template.get(name) or {}
        if template:
            metadata = {"name": f"{thing['metadata']['name']}.{path[-1]}"}
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata}
            found.append({**pod, "template": template})
    return found


def _builtin(objects: list[dict[str, Any]], versions: Sequence[str]) -> list[tuple[str, str, str]]:
    worker = Path(__file__).with_name("schema_worker.py")
    done = subprocess.run(
        [str(environment("charts") / "python"), str(worker)],
        input=json.dumps({"versions": list(versions), "objects": objects}),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert not done.returncode, done.stderr
    return [(version, name_of(objects[i]), text) for version, i, text in json.loads(done.stdout)]
