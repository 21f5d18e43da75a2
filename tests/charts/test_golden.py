"""Prevents: a change of what the presets install that no review sees, or that only one Helm makes."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from tests.charts.golden import FOLDER, name_of
from tests.charts.rendering import HELMS, PRESETS, render

EXPECTED = {
    "cpu-demo",
    "single-gpu",
    "multi-gpu",
    "offload-cpu",
    "offload-shared",
    "llm-d",
    "openshift",
}


def test_every_preset_has_a_render_and_the_other_way_round() -> None:
    names = {name_of(path) for path in PRESETS}
    assert names >= EXPECTED
    assert {path.stem for path in FOLDER.glob("*.yaml")} == names


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_preset_renders_as_checked_in(preset: Path, helm: int) -> None:
    """Where it should differ: ``python -m tests.charts.golden``, and look at the difference."""
    rendered = render(preset=preset, helm=helm).text
    kept = (FOLDER / f"{name_of(preset)}.yaml").read_text(encoding="utf-8")
    difference = difflib.unified_diff(
        _normal(kept), _normal(rendered), "checked in", f"Helm {helm}", lineterm=""
    )
    assert not (lines := list(difference)), os.linesep.join(lines)


def _normal(text: str) -> list[str]:
    """The lines, without the empty ones that Helm's majors put in different places between objects."""
    return [line for line in text.splitlines() if line.strip()]
