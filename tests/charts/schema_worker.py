"""Check objects against Kubernetes's schemas, in the environment that has them.

Reads ``{"versions": [...], "objects": [...]}`` from the standard input, writes a list of
``[version, index of the object, problem]``. Run by ``tests.charts.validation``.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
from kubernetes_validate.utils import all_versions
from referencing import Registry, Resource

SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema"


@cache
def _folder(version: str) -> str:
    """The folder of a minor version; the package's own choice of an older one would hide a missing one."""
    full = {each for each in all_versions() if each.rpartition(".")[0] == version}
    if len(full) != 1:
        raise SystemExit(f"no schemas of Kubernetes {version}: {all_versions()}")
    return f"v{full.pop()}-local-strict"


@cache
def _read(version: str, name: str) -> Any:
    path = SCHEMAS / _folder(version) / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@cache
def _definitions(version: str) -> Any:
    resource: Any = Resource.from_contents(_read(version, "_definitions"))
    return resource @ Registry()


@cache
def _validator(version: str, name: str) -> Any:
    schema = _read(version, name)
    if schema is None:
        return None
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _problems(version: str, thing: dict[str, Any]) -> list[str]:
    group, _, api = thing["apiVersion"].rpartition("/")
    parts = [thing["kind"].lower(), group.partition(".")[0], api]
    validator = _validator(version, "-".join(part for part in parts if part))
    if validator is None:
        return [f"{thing['apiVersion']} {thing['kind']} is unknown"]
    return [
        f"{'.'.join(map(str, error.path)) or '(object)'}: {error.message[:300]}"
        for error in validator.iter_errors(thing)
    ]


def main() -> None:
    """Check what the standard input has."""
    asked = json.load(sys.stdin)
    found = [
        [version, index, problem]
        for version in asked["versions"]
        for index, thing in enumerate(asked["objects"])
        for problem in _problems(version, thing)
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
