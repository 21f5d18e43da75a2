"""Prevents: a template without tests of its own, tests that only say yes, and values that nothing reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import CHART

TEMPLATES = sorted((CHART / "templates").rglob("*.yaml"))
HERE = Path(__file__).parent
NEGATIVE = re.compile(r"\brefusal\(|\bassert not ")


def test_file(template: Path) -> Path:
    """Tests of ``exporter/service.yaml`` are in ``test_exporter_service.py``."""
    parts = template.relative_to(CHART / "templates").with_suffix("").parts
    return HERE / f"test_{'_'.join(parts).replace('-', '_')}.py"


test_file.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_has_tests_and_they_also_refuse(template: Path) -> None:
    path = test_file(template)
    assert path.exists(), f"{template.relative_to(CHART)} needs {path.name}"
    assert NEGATIVE.search(path.read_text(encoding="utf-8")), f"{path.name} only says yes"


def test_every_value_is_read_by_a_template() -> None:
    """A value that nothing reads promises what does not happen."""
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (CHART / "templates").rglob("*")
        if path.is_file()
    )
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert unread(values, text) == []


def test_a_value_that_nothing_reads_is_found() -> None:
    values = {"a": {"b": 1, "c": {"d": 2}}}
    assert unread(values, "{{ .Values.a.b }}") == ["a.c.d"]
    assert unread(values, "{{ .Values.a.b }} {{ toYaml .Values.a.c }}") == []


def unread(values: dict[str, Any], text: str, path: str = "") -> list[str]:
    """Paths of the values whose names are nowhere in the templates; a mapping may be written out whole."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict) and value and not _is_written_whole(name, text):
            found += unread(value, text, f"{path}{name}.")
        elif not re.search(rf"\b{name}\b", text):
            found.append(f"{path}{name}")
    return found


def _is_written_whole(name: str, text: str) -> bool:
    return re.search(rf'(toYaml|"extra"|deepCopy) [$.\w]*\.{name}\b', text) is not None
