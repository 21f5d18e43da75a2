"""Plot of benchmarks/results/gpu_h200.json for the README."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
GREY, LIGHT, DARK = "#8c9099", "#9dc1e6", "#1f6fb2"


def main() -> None:
    """Draw times to the first token, and the ratios to stock with their goals."""
    result = json.loads((RESULTS / "gpu_h200.json").read_text(encoding="utf-8"))
    rows = {row["work"]: row for row in result["rows"]}
    pyplot.rcParams["svg.hashsalt"] = "vllm_spans"
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 3.8))

    shapes = ("16 x 512", "32 x 1024")
    for place, shape in enumerate(shapes):
        warm = rows[f"TTFT {shape}, warm in a new order"]
        cold = rows[f"TTFT {shape}, first use (all cold)"]
        bars = times.bar(
            [place - 0.27, place, place + 0.27],
            [warm["stock"], cold["spans"], warm["spans"]],
            0.27,
            color=[GREY, LIGHT, DARK],
        )
        times.bar_label(bars, fmt="%.0f", fontsize=8)
    for label, colour in (
        ("stock vLLM", GREY),
        ("spans, first use", LIGHT),
        ("spans, new order", DARK),
    ):
        times.bar([0], [0], color=colour, label=label)
    times.set_xticks(range(len(shapes)), [f"{shape} tokens" for shape in shapes])
    times.set(title="Time to the first token", ylabel="milliseconds", xlabel="documents")
    times.legend(frameon=False, fontsize=8)

    shown = [row for row in result["rows"] if not row["work"].startswith("kernel") and row["goal"]]
    labels = [row["work"].replace(", all cold", "") for row in shown]
    colours = [DARK if row["met"] else GREY for row in shown]
    ratios.barh(range(len(shown)), [row["ratio"] for row in shown], color=colours)
    ratios.scatter(
        [row["goal"] for row in shown],
        range(len(shown)),
        marker="|",
        s=160,
        color="black",
        label="goal",
    )
    ratios.set_yticks(range(len(shown)), labels, fontsize=7)
    ratios.invert_yaxis()
    ratios.set_xscale("log")
    ratios.set(title="Times better than stock (grey: goal missed)")
    ratios.legend(frameon=False, fontsize=8)
    for axes in (times, ratios):
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(
        0.5,
        0.005,
        result["meta"]["shape"] + "; " + result["meta"]["device"],
        ha="center",
        fontsize=7,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(RESULTS / "gpu_h200.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
