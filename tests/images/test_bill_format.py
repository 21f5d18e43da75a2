"""Prevents: a bill of materials that no scanner reads."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import referencing

from images import versions, wheels
from images.build import ALL, SBOM
from tests.images.containers import output

FOLDER, SUFFIX = "cyclonedx/schema/_res/", ".SNAPSHOT.schema.json"
BASE = "http://cyclonedx.org/schema/"
LOCK = versions.ROOT / "requirements" / "images.lock"


@pytest.fixture(scope="module")
def errors() -> Callable[[dict[str, Any]], list[str]]:
    """CycloneDX's own schema, as the maintainers' Python library carries it."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    (pin,) = [line for line in lines if line and line[0] != "#"]
    with wheels.locked(), zipfile.ZipFile(wheels.fetch([pin])[pin]) as archive:
        schemas = {
            # They refer to each other by file names.
            f"{BASE}{name}{SUFFIX}": json.loads(archive.read(f"{FOLDER}{name}{SUFFIX}"))
            for name in ("bom-1.5", "spdx", "jsf-0.82")
        }
    registry: referencing.Registry[Any] = referencing.Registry().with_resources(
        (address, referencing.Resource.from_contents(schema)) for address, schema in schemas.items()
    )
    schema = schemas[f"{BASE}bom-1.5{SUFFIX}"]
    validator = jsonschema.validators.validator_for(schema)(schema, registry=registry)

    def check(document: dict[str, Any]) -> list[str]:
        return [
            f"{error.json_path}: {error.message}"[:300] for error in validator.iter_errors(document)
        ]

    return check


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_bill_is_what_its_schema_says(
    name: str, errors: Callable[[dict[str, Any]], list[str]]
) -> None:
    bill = json.loads(output(name, "cat", SBOM))
    assert errors(bill) == []
    assert len({each["bom-ref"] for each in bill["components"]}) == len(bill["components"])


def test_a_mistake_is_found(errors: Callable[[dict[str, Any]], list[str]]) -> None:
    """A schema that takes anything would pass every bill."""
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
    assert errors(bill) == []
    assert errors({**bill, "components": [{"type": "libary", "name": "a"}]})
    assert errors({**bill, "component": []})
