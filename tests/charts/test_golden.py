"""Prevents: a change of what the presets install that no review sees, or that only one Helm makes."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from tests.charts.golden import FOLDER, name_of, shown
from tests.charts.rendering import PRESETS, render

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


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_preset_renders_as_checked_in(preset: Path, helm: int) -> None:
    """Where it should differ: ``make chart-files``, and look at the difference."""
    kept = (FOLDER / f"{name_of(preset)}.yaml").read_text(encoding="utf-8")
    rendered = shown(render(preset=preset, helm=helm).text)
    difference = difflib.unified_diff(
        kept.splitlines(), rendered.splitlines(), "checked in", f"Helm {helm}", lineterm=""
    )
    assert not (lines := list(difference)), os.linesep.join(lines)


def test_only_the_texts_of_files_are_left_out() -> None:
    text = "data:\n  a.toml: |\n    # text\n\n    kind = 1\n  b: c\n---\n    d: e\n"
    assert shown(text) == "data:\n  a.toml: | (left out)\n  b: c\n---\n    d: e\n"
