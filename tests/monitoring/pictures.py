"""Draw each dashboard as it is after real traffic: what ``make dashboard-pictures`` runs.

The queries are those of the dashboards' JSON, the numbers Prometheus's answers to them; Grafana itself is not here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from tests.engine.harness import ROOT
from tests.monitoring.live import Live
from tests.monitoring.queries import DASHBOARDS, fill_in
from tests.reference.models import save_model
from tests.reference.tokenizer import save_tokenizer

DOCS = ROOT / "docs"
COLUMN, ROW = 0.58, 0.36
"""Inches of a unit of Grafana's grid."""
MOST_ROWS = 8
MOST_SILENT = 4
"""Of more series than this, those that are 0 all the time are not named."""
UNITS = {"percentunit": "%", "reqps": "requests/s", "ops": "1/s", "s": "seconds"}
UNITS |= {"short": "", "none": ""}
SHOWN_LABELS = ("model", "model_name", "instance", "span", "version", "vllm_version", "gap_policy")
SHOWN_LABELS += ("gap_length", "block_size")


def story(live: Live, files: Path) -> tuple[float, float]:
    """Traffic that a reader can follow: long gaps from 30 s to 55 s, and files cut short from 75 s on.

    Args:
        live: The fleet.
        files: Folder of the file tier.

    Returns:
        Begin and end, in seconds since the epoch.
    """
    time.sleep(12)
    begin = time.time()
    time.sleep(30)
    live.traffic.gap_length = 96
    time.sleep(25)
    live.traffic.gap_length = None
    time.sleep(20)
    for _ in range(5):
        for path in files.rglob("*.kv"):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, 100)
        time.sleep(5)
    return begin, time.time()


def draw(path: Path, live: Live, begin: float, end: float) -> None:
    """Draw one dashboard.

    Args:
        path: Its JSON.
        live: Where the answers come from.
        begin: Left end of all time axes.
        end: Right end.
    """
    tree = json.loads(path.read_text(encoding="utf-8"))
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in tree["panels"])
    width = 24 * COLUMN
    figure = plt.figure(figsize=(width, height * ROW), facecolor="white")
    for panel in tree["panels"]:
        place = panel["gridPos"]
        left, right = place["x"] * COLUMN + 0.55, (place["x"] + place["w"]) * COLUMN - 0.15
        top, bottom = place["y"] * ROW, (place["y"] + place["h"]) * ROW
        if panel["type"] == "row":
            y = 1 - (top + bottom) / 2 / (height * ROW)
            figure.text(0.01, y, panel["title"], fontsize=12, weight="bold", va="center")
            continue
        foot = {"timeseries": 0.75, "stat": 0.15, "table": 0.1}[panel["type"]]
        axes = figure.add_axes(
            (
                left / width,
                1 - (bottom - foot) / (height * ROW),
                (right - left) / width,
                (bottom - top - foot - 0.35) / (height * ROW),
            )
        )
        axes.set_title(panel["title"], fontsize=9, loc="left", color="#333333")
        {"timeseries": lines, "stat": number, "table": rows}[panel["type"]](
            axes, panel, live, begin, end
        )
    target = DOCS / f"{path.stem}.png"
    figure.savefig(target, dpi=75)
    plt.close(figure)
    print(target)


def lines(axes: Axes, panel: dict[str, Any], live: Live, begin: float, end: float) -> None:
    """A panel of lines or of stacked areas."""
    stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
    found: dict[str, dict[float, float]] = {}
    for target in panel["targets"]:
        answer = live.ask(
            "query_range",
            query=fill_in(target["expr"]),
            start=str(begin),
            end=str(end),
            step="1",
        )["result"]
        for series in answer:
            name = legend(target.get("legendFormat", ""), series["metric"])
            found[name] = {
                float(when) - begin: float(value)
                for when, value in series["values"]
                if value != "NaN"
            }
    assert found, panel["title"]
    named = {name: values for name, values in found.items() if any(values.values())}
    if len(found) <= MOST_SILENT:
        named = found
    shown = dict(sorted((named or dict(list(found.items())[:1])).items()))
    if stacked:
        times = sorted({when for values in shown.values() for when in values})
        axes.stackplot(
            times,
            [[values.get(when, 0.0) for when in times] for values in shown.values()],
            labels=list(shown),
            alpha=0.65,
        )
    else:
        for name, values in shown.items():
            axes.plot(list(values), list(values.values()), label=name, linewidth=1.3)
    if len(shown) < len(found):
        axes.plot([], [], " ", label=f"{len(found) - len(shown)} more at 0")
    highest = max(value for values in shown.values() for value in values.values())
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_ylim(0, defaults.get("max") or (None if highest else 1))
    axes.set_xlim(0, end - begin)
    unit = UNITS.get(defaults["unit"], defaults["unit"].removeprefix("suffix: "))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, unit)))
    axes.set_title("" if unit == "%" else unit, fontsize=8, loc="right", color="#777777")
    axes.tick_params(labelsize=7, length=2, colors="#555555")
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.09),
        fontsize=7,
        frameon=False,
        ncols=min(4, max(1, len(shown))) if max(map(len, shown)) < 24 else 2,
        columnspacing=1.2,
        handlelength=1.2,
        borderaxespad=0,
    )


def tick(value: float, unit: str) -> str:
    """Text of a number on an axis."""
    if unit == "%":
        return f"{value:.0%}"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def number(axes: Axes, panel: dict[str, Any], live: Live, begin: float, end: float) -> None:
    """A panel with one number."""
    del begin
    answer = live.ask("query", query=fill_in(panel["targets"][0]["expr"]), time=str(end))["result"]
    assert answer, panel["title"]
    value = float(answer[0]["value"][1])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    text = f"{value:.0%}" if unit == "percentunit" else f"{value:.3g}"
    text += " /s" if unit == "reqps" else ""
    axes.text(0.5, 0.5, text, fontsize=20, ha="center", va="center", color="#1a7f37")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#dddddd")


def rows(axes: Axes, panel: dict[str, Any], live: Live, begin: float, end: float) -> None:
    """A panel with a table; its first rows."""
    del begin
    answer = live.ask("query", query=fill_in(panel["targets"][0]["expr"]), time=str(end))["result"]
    assert answer, panel["title"]
    names = [name for name in SHOWN_LABELS if name in answer[0]["metric"]]
    cells = [
        [*(sample["metric"].get(name, "")[:20] for name in names), sample["value"][1]]
        for sample in answer[:MOST_ROWS]
    ]
    axes.axis("off")
    shown = axes.table(
        cells,
        colLabels=[*names, "value"],
        bbox=(0, 1 - 0.11 * (len(cells) + 1), 1, 0.11 * (len(cells) + 1)),
        cellLoc="left",
        colLoc="left",
        edges="horizontal",
    )
    shown.auto_set_font_size(False)
    shown.set_fontsize(7.5)


def legend(pattern: str, labels: dict[str, str]) -> str:
    """Grafana's legend format filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern) or "value"


def main() -> None:
    """Start everything, send traffic, draw."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model("llama", Path(folder) / "model")
        save_tokenizer(model)
        live = Live(str(model), Path(folder))
        try:
            begin, end = story(live, Path(folder) / "files")
            for path in sorted(DASHBOARDS.glob("*.json")):
                draw(path, live, begin, end)
        finally:
            live.close()


if __name__ == "__main__":
    main()
