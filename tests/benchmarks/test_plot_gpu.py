"""Prevents plots in the README that leave out what was measured, or show another number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import plot_gpu

RESULTS = Path(plot_gpu.__file__).parent / "results"


def read(name: str) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def texts(axes: Any) -> set[str]:
    """All that is written inside a panel."""
    return {text.get_text() for text in axes.texts}


def test_the_load_figure_shows_both_kernels_at_every_size() -> None:
    rows = read("gpu_h200_kernels.json")["rows"]
    figure = plot_gpu.draw_load(read("gpu_h200.json"), rows)
    maps = figure.axes[-2:]
    assert ["Our" in maps[0].get_title(), "Triton" in maps[1].get_title()] == [True, True]
    mine = [row for row in rows if row["work"].startswith(f"decode {plot_gpu.KERNEL_SHAPE} ")]
    assert len(mine) == 16
    for axes, key in zip(maps, ("spans", "unified"), strict=True):
        assert texts(axes) == {f"{row[key] / row['stock']:.2f}" for row in mine}


def test_the_figure_of_times_draws_every_point_of_the_sweep() -> None:
    result = read("gpu_h200.json")
    panels = dict(zip(plot_gpu.CURVES, plot_gpu.draw_times(result).axes[1:], strict=True))
    for name, axes in panels.items():
        points = [point for point in result["sweep"] if point["sweep"] == name]
        assert points
        for line in axes.lines:
            assert len(line.get_xdata()) == len(points)
