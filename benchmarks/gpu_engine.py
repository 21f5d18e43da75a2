"""Spans against stock vLLM on one GPU, both engines in one run: answers first, then times.

    python -m benchmarks.gpu_engine --out results.json [--only correctness ttft decode blocks throughput sweep profile]

Weights are random (``load_format="dummy"``) in the shape of Llama 3 8B and prompts are token ids: nothing is
downloaded. `ratio` is stock / spans, so more is better; `goal` is the least ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUESTION = 64


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, spans: bool, arguments: dict[str, Any], log: Path) -> None:
        self.name = name
        environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_V1_SPANS_")}
        environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if spans:
            environ["VLLM_V1_SPANS_ENABLED"] = "1"
        self._log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=environ,
            )
        self._send(arguments)

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is up."""
        return self._receive()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation of ``gpu_child.Child``."""
        self._send({"op": op, **arguments})
        answer = self._receive()
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {op}: {answer['error']}\n{self._tail()}")
        return answer

    def one(
        self, tokens: list[int], extra: dict[str, Any] | None = None, salt: str | None = None
    ) -> float:
        """Milliseconds to the first token of a lone request."""
        request = {"tokens": tokens, "extra_args": extra, "salt": salt}
        return float(self.ask("run", requests=[request])["seconds"]) * 1e3

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended:\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


@contextlib.contextmanager
def engines(
    arguments: dict[str, Any],
    logs: Path,
    stock: dict[str, Any] | None = None,
    spans: dict[str, Any] | None = None,
) -> Iterator[tuple[Engine, Engine]]:
    """Stock vLLM and vLLM with spans, alive at once."""
    pair: list[Engine] = []
    try:
        for name, extra in (("stock", stock or {}), ("spans", spans or {})):
            engine = Engine(name, name == "spans", {**arguments, **extra}, logs / f"{name}.log")
            pair.append(engine)
            say(f"{name} is up: {engine.ready()}")
        yield pair[0], pair[1]
    finally:
        for engine in pair:
            engine.close()


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f}] {text}", flush=True)


START = time.monotonic()


class Corpus:
    """Documents of random tokens."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(100, self._vocabulary) for _ in range(count)]

    def prompt(
        self, documents: list[list[int]], prefix: int = 0, question: int = QUESTION
    ) -> tuple[list[int], dict[str, Any]]:
        """A prompt over documents in a random order: tokens and layout."""
        order = documents[:]
        self._rng.shuffle(order)
        tokens, starts = self.tokens(prefix), []
        for document in order:
            starts.append(len(tokens))
            tokens += document
        cross = len(tokens)
        return tokens + self.tokens(question), {"span_starts": starts, "cross_span_starts": [cross]}


def row(
    work: str,
    stock: float,
    spans: float,
    unit: str,
    *,
    floor: float | None = None,
    goal: float | None = None,
    more_is_better: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """One line of the result file."""
    ratio = spans / stock if more_is_better else stock / spans
    met = None if goal is None else ratio >= goal
    say(
        f"{work}: stock {stock:.3f} spans {spans:.3f} {unit}, ratio {ratio:.3f}, goal {goal}, met {met}"
    )
    return {
        "work": work,
        "stock": round(stock, 3),
        "spans": round(spans, 3),
        "unit": unit,
        "ratio": round(ratio, 3),
        "floor": floor,
        "goal": goal,
        "met": met,
        **extra,
    }


def median_of(function: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Median, least and greatest of some calls."""
    values = [function() for _ in range(repeats)]
    return statistics.median(values), min(values), max(values)


def ttft(
    stock: Engine, spans: Engine, cases: list[tuple[int, int, float | None, float | None]]
) -> list[dict[str, Any]]:
    """TTFT of stock cold, stock fully cached, spans cold, warm in a new order, and without spans."""
    corpus = Corpus(1, 128000)
    for engine in (stock, spans):
        for size in (8192, 32768):
            engine.one(corpus.tokens(size))
    rows = []
    for count, length, warm_goal, cold_goal in cases:
        documents = [corpus.tokens(length) for _ in range(count)]
        name = f"{count} x {length}"
        cold_stock, cold_spans, free_spans, warm, cached = [], [], [], [], []
        warmed = [corpus.tokens(length) for _ in range(count)]
        spans.one(*corpus.prompt(warmed))
        spans.one(*corpus.prompt(warmed))
        for _ in range(5):
            fresh = [corpus.tokens(length) for _ in range(count)]
            tokens, layout = corpus.prompt(fresh)
            cold_stock.append(stock.one(tokens))
            cold_spans.append(spans.one(tokens, layout))
            free_spans.append(spans.one(corpus.tokens(len(tokens))))
            cached.append(stock.one(tokens[:-QUESTION] + corpus.tokens(QUESTION)))
            warm.append(spans.one(*corpus.prompt(warmed)))
        del documents
        middle = statistics.median
        spread = {
            "spread": {"warm": [min(warm), max(warm)], "stock": [min(cold_stock), max(cold_stock)]}
        }
        floor = round(middle(cached), 3)
        rows += [
            row(
                f"TTFT {name}, warm in a new order",
                middle(cold_stock),
                middle(warm),
                "ms",
                floor=floor,
                goal=warm_goal,
                **spread,
            ),
            row(
                f"TTFT {name}, first use (all cold)",
                middle(cold_stock),
                middle(cold_spans),
                "ms",
                goal=cold_goal,
            ),
            row(
                f"TTFT {name}, no spans",
                middle(cold_stock),
                middle(free_spans),
                "ms",
                goal=round(1 / 1.03, 3),
            ),
        ]
    return rows


def decode(stock: Engine, spans: Engine, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Time of a decode step without spans."""
    corpus = Corpus(2, 128000)
    rows = []
    for batch, context in cases:
        requests = [{"tokens": corpus.tokens(context)} for _ in range(batch)]
        times = {}
        for _ in range(2):
            for engine in (stock, spans):
                steps = engine.ask("decode", requests=requests, steps=40)["milliseconds"]
                times.setdefault(engine.name, []).append(statistics.median(steps))
        rows.append(
            row(
                f"decode step, {batch} x {context}, no spans",
                min(times["stock"]),
                min(times["spans"]),
                "ms",
                goal=round(1 / 1.02, 3),
            )
        )
    return rows


def blocks(stock: Engine, spans: Engine) -> list[dict[str, Any]]:
    """KV blocks in use by 32 requests over the same 32 documents in 32 orders."""
    corpus = Corpus(3, 128000)
    documents = [corpus.tokens(1024) for _ in range(32)]
    used = {}
    for engine in (stock, spans):
        engine.ask("reset")
        requests = []
        for _ in range(32):
            tokens, layout = corpus.prompt(documents)
            requests.append(
                {
                    "tokens": tokens,
                    "extra_args": layout if engine is spans else None,
                    "max_tokens": 64,
                }
            )
        if engine is spans:
            engine.ask("run", requests=requests[:1])
        used[engine.name] = engine.ask("run", requests=requests)["blocks_used"]
    return [
        row(
            "KV blocks in use, 32 requests x 32 documents of 1024",
            used["stock"],
            used["spans"],
            "blocks",
            goal=4,
        )
    ]


def throughput(stock: Engine, spans: Engine, num_requests: int) -> list[dict[str, Any]]:
    """Closed loop over a shared-document workload: Zipf over 256 documents, 16 a request, random order."""
    seconds, used = {}, {}
    for engine in (stock, spans):
        corpus = Corpus(4, 128000)
        documents = [corpus.tokens(512) for _ in range(256)]
        rng = random.Random(5)
        weights = [1 / (rank + 1) for rank in range(256)]
        engine.ask("reset")
        requests = []
        for _ in range(num_requests):
            chosen: list[int] = []
            while len(chosen) < 16:
                (index,) = rng.choices(range(256), weights)
                if index not in chosen:
                    chosen.append(index)
            tokens, layout = corpus.prompt([documents[index] for index in chosen], prefix=128)
            requests.append(
                {
                    "tokens": tokens,
                    "extra_args": layout if engine is spans else None,
                    "max_tokens": 32,
                }
            )
        answer = engine.ask("run", requests=requests)
        seconds[engine.name], used[engine.name] = answer["seconds"], answer["blocks_used"]
    stock_rate, spans_rate = (num_requests / seconds[name] for name in ("stock", "spans"))
    return [
        row(
            f"requests/s, {num_requests} requests, 16 of 256 documents of 512 (Zipf)",
            stock_rate,
            spans_rate,
            "1/s",
            goal=5,
            more_is_better=True,
            blocks_used=used,
        )
    ]


def sweep(stock: Engine, spans: Engine) -> list[dict[str, Any]]:
    """Gap length, document length and context."""
    corpus = Corpus(6, 128000)
    rows = []
    for gap in (0, 16, 32, 64, 128):
        documents = [corpus.tokens(1024) for _ in range(32)]
        extra = {"span_gap_policy": "none"} if gap == 0 else {"span_gap_length": gap}

        def ask(documents: list[list[int]] = documents, extra: dict[str, Any] = extra) -> float:
            tokens, layout = corpus.prompt(documents)
            return spans.one(tokens, layout | extra)

        cold, _ = ask(), ask()
        warm, low, high = median_of(ask, 4)
        rows.append(
            {
                "sweep": "gap length",
                "x": gap,
                "cold_ms": cold,
                "warm_ms": warm,
                "spread": [low, high],
            }
        )
        say(str(rows[-1]))
    for length in (256, 512, 1024, 2048, 4096):
        documents = [corpus.tokens(length) for _ in range(32768 // length)]
        cold = spans.one(*corpus.prompt(documents))
        spans.one(*corpus.prompt(documents))
        warm, low, high = median_of(
            lambda documents=documents: spans.one(*corpus.prompt(documents)), 4
        )
        rows.append(
            {
                "sweep": "document length",
                "x": length,
                "cold_ms": cold,
                "warm_ms": warm,
                "spread": [low, high],
            }
        )
        say(str(rows[-1]))
    for context in (8192, 16384, 32768, 65536, 126976):
        documents = [corpus.tokens(1024) for _ in range(context // 1024)]
        tokens, layout = corpus.prompt(documents)
        stock_ms = stock.one(tokens)
        cold = spans.one(tokens, layout)
        spans.one(*corpus.prompt(documents))
        warm, low, high = median_of(
            lambda documents=documents: spans.one(*corpus.prompt(documents)), 3
        )
        rows.append(
            {
                "sweep": "context",
                "x": context,
                "stock_ms": stock_ms,
                "cold_ms": cold,
                "warm_ms": warm,
                "spread": [low, high],
            }
        )
        say(str(rows[-1]))
    return rows


def profiles(stock: Engine, spans: Engine) -> dict[str, Any]:
    """Where one warm step goes."""
    corpus = Corpus(7, 128000)
    result = {}
    for count, length in ((32, 1024), (16, 512)):
        documents = [corpus.tokens(length) for _ in range(count)]
        for _ in range(3):
            spans.one(*corpus.prompt(documents))
        tokens, layout = corpus.prompt(documents)
        result[f"spans warm {count} x {length}"] = spans.ask(
            "profile", requests=[{"tokens": tokens, "extra_args": layout}]
        )
        tokens, _ = corpus.prompt(documents)
        stock.one(tokens)
        fresh = tokens[:-QUESTION] + corpus.tokens(QUESTION)
        result[f"stock cached {count} x {length}"] = stock.ask(
            "profile", requests=[{"tokens": fresh}]
        )
    for name, profile in result.items():
        say(f"{name}: GPU {profile.get('gpu_ms')} ms")
        for line in profile.get("kernels", [])[:8]:
            say(f"    {line}")
        for line in profile["host"][:12]:
            say(f"    host {line}")
    return result


def main() -> None:
    """Run the parts and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engine", description=__doc__)
    parts = ["correctness", "ttft", "decode", "blocks", "throughput", "sweep", "profile"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument(
        "--model", type=Path, help="folder of a real model for the correctness part"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=256, help="requests of the throughput part")
    options = parser.parse_args()
    import torch
    import vllm

    result: dict[str, Any] = {"rows": []}
    meta = {
        "command": " ".join(["python -m benchmarks.gpu_engine", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    result["meta"] = meta

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        logs = Path(os.environ.get("OUT", folder))
        if "correctness" in options.only:
            from benchmarks import gpu_correctness

            result["correctness"] = gpu_correctness.check(Path(folder), logs, options.model)
            save()
        model = Path(folder) / "llama-8b"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(LLAMA_8B))
        arguments = {
            "model": str(model),
            "load_format": "dummy",
            "max_model_len": 131072,
            "max_num_batched_tokens": 40960,
            "gpu_memory_utilization": 0.44,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256],
            },
            "disable_log_stats": True,
        }
        rest = [part for part in options.only if part != "correctness"]
        if rest:
            with engines(arguments, logs) as (
                stock,
                spans,
            ):
                for part in rest:
                    try:
                        if part == "ttft":
                            result["rows"] += ttft(
                                stock, spans, [(32, 1024, 20, 1.0), (16, 512, 6, round(1 / 1.1, 3))]
                            )
                        elif part == "decode":
                            result["rows"] += decode(stock, spans, [(1, 4096), (64, 4096)])
                        elif part == "blocks":
                            result["rows"] += blocks(stock, spans)
                        elif part == "throughput":
                            result["rows"] += throughput(stock, spans, options.requests)
                        elif part == "sweep":
                            result["sweep"] = sweep(stock, spans)
                        elif part == "profile":
                            result["profile"] = profiles(stock, spans)
                    except RuntimeError as error:
                        say(f"{part} FAILED: {error}")
                        result.setdefault("failed", {})[part] = str(error)
                        break
                    save()
    save()


if __name__ == "__main__":
    main()
