"""Prevents: values that are misspelled or of another kind and are passed over; a schema that knows other values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.charts.rendering import CHART, refusal

Schema = dict[str, Any]
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA: Schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)
OPEN_ON_PURPOSE = {
    "affinity": "Kubernetes's own, checked with the objects",
    "tolerations": "Kubernetes's own, checked with the objects",
    "config": "the picker's own, which differs between its versions",
    "plugins": "the picker's own",
    "schedulingProfiles": "the picker's own",
}
"""Keys whose objects may hold anything -> why."""


def resolved(schema: Schema) -> Schema:
    """A schema, or what it refers to."""
    while "$ref" in schema:
        target: Any = SCHEMA
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        schema = target
    return schema


def parts(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """A schema and all below it, with their paths; ``*`` stands for any key, ``[]`` for any item."""
    schema = resolved(schema)
    yield path, schema
    below = {(*path, name): each for name, each in schema.get("properties", {}).items()}
    if isinstance(schema.get("additionalProperties"), dict):
        below[*path, "*"] = schema["additionalProperties"]
    if "items" in schema:
        below[*path, "[]"] = schema["items"]
    for where, each in below.items():
        yield from parts(each, where)


def differences(values: Any, schema: Schema, path: str = "") -> list[str]:
    """Keys that only the values or only the schema has."""
    known = resolved(schema).get("properties")
    if known is None or not isinstance(values, dict):
        return []
    found = [f"{path}{name} has no schema" for name in values.keys() - known.keys()]
    found += [f"{path}{name} has no default" for name in known.keys() - values.keys()]
    for name in values.keys() & known.keys():
        found += differences(values[name], known[name], f"{path}{name}.")
    return sorted(found)


def mappings(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the mappings in values."""
    if isinstance(values, dict):
        yield path
        for name, each in values.items():
            yield from mappings(each, (*path, name))


def is_open(path: tuple[str, ...]) -> bool:
    return bool(OPEN_ON_PURPOSE.keys() & set(path))


def test_the_defaults_are_valid() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert list(VALIDATOR(SCHEMA).iter_errors(VALUES)) == []


def test_values_and_schema_have_the_same_keys_at_every_depth() -> None:
    assert [
        each for each in differences(VALUES, SCHEMA) if not is_open(tuple(each.split(".")))
    ] == []


def test_no_object_takes_any_key() -> None:
    loose = [
        ".".join(path)
        for path, schema in parts(SCHEMA)
        if (schema.get("type") == "object" or "properties" in schema)
        and "additionalProperties" not in schema
        and not is_open(path)
    ]
    assert loose == []


def test_nothing_is_without_a_type() -> None:
    """Such a value could be anything, and a template would print it."""
    kinds = {"type", "enum", "const", "oneOf", "anyOf", "allOf"}
    untyped = [
        ".".join(path)
        for path, schema in parts(SCHEMA)
        if not schema.keys() & kinds and not is_open(path)
    ]
    assert untyped == []


def test_a_misspelled_key_is_refused_at_every_depth() -> None:
    validator = VALIDATOR(SCHEMA)
    for path in mappings(VALUES):
        schema = SCHEMA
        for name in path:
            schema = resolved(schema).get("properties", {}).get(name, {})
        if is_open(path) or resolved(schema).get("additionalProperties") is not False:
            continue
        values: dict[str, Any] = {"mispelled": 1}
        for name in reversed(path):
            values = {name: values}
        assert not validator.is_valid(values), ".".join(path)


@pytest.mark.parametrize(
    "values", [{"exporterr": {}}, {"exporter": {"image": {"tagg": "1"}}}, {"loadtest": []}]
)
def test_helm_reads_the_schema(helm: int, values: dict[str, Any]) -> None:
    assert "values don't meet the specifications of the schema" in refusal(values, helm=helm)
