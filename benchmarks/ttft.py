"""Time to the first token on the CPU: stock vLLM and spans, cold and in a new order."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import SPANS, STOCK, EngineProcess, Request, running
from benchmarks.report import row, say
from benchmarks.workloads import Corpus, unmarked

DOCUMENT_TOKENS = 256
PREFIX_TOKENS = 64
QUESTION_TOKENS = 64
GOAL_DOCUMENTS, GOAL = 8, 4.0
VOCABULARY = 40_000
ENGINE = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 8192}
# The engine's workers spin this long for more work; the other engine is measured after that.
_QUIET_SECONDS = 1.2


def measure(model: Path, folder: Path, counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Measure both engines in turn.

    Args:
        model: Folder of the model.
        folder: Where the engines' logs go.
        counts: Numbers of documents.
        repeats: Measurements of each kind; the median counts.

    Returns:
        Rows of the result file.
    """
    say("starting stock vLLM and vLLM with spans")
    pair = [_engine(name, model, folder) for name in (STOCK, SPANS)]
    with running(*pair, at_once=True) as (stock, spans):
        corpus = Corpus("warm-up", VOCABULARY)
        warm_up = corpus.request(corpus.documents(2, DOCUMENT_TOKENS))
        for _ in range(2):  # whatever the engines set up lazily
            stock.timing(unmarked(warm_up))
            spans.timing(warm_up)
        rows = []
        for documents in counts:
            taken = _take(stock, spans, documents, repeats)
            rows += _rows(
                documents, {name: statistics.median(all_) for name, all_ in taken.items()}
            )
    return rows


def _engine(name: str, model: Path, folder: Path) -> EngineProcess:
    return EngineProcess(
        name,
        folder,
        {"model": str(model), **ENGINE},
        {"VLLM_CPU_KVCACHE_SPACE": "2"},
        quiet_seconds=_QUIET_SECONDS,
    )


def _take(
    stock: EngineProcess, spans: EngineProcess, documents: int, repeats: int
) -> dict[str, list[float]]:
    names = ("stock cold", "spans cold", "stock warm", "spans warm", "stock floor")
    taken: dict[str, list[float]] = {name: [] for name in names}
    corpus = Corpus(documents, VOCABULARY, QUESTION_TOKENS)

    def run(name: str, request: Request, salt: str) -> None:
        engine = stock if name.startswith("stock") else spans
        request = request if engine is spans else unmarked(request)
        taken[name].append(engine.timing({**request, "salt": salt}).seconds)

    for repeat in range(repeats):
        material = corpus.documents(documents, DOCUMENT_TOKENS)
        prefix = corpus.tokens(PREFIX_TOKENS)
        salt = f"{documents}-{repeat}"
        first = corpus.request(material, prefix)
        other = corpus.shuffled(material, prefix)
        steps = [
            ("stock cold", first),
            ("spans cold", first),
            ("stock warm", other),
            ("spans warm", other),
        ]
        if repeat % 2:  # neither engine always goes first
            steps[:2], steps[2:] = steps[1::-1], steps[:1:-1]
        for name, request in steps:
            run(name, request, salt)
        run("stock floor", other, salt)
        line = ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in taken.items())
        say(f"{documents} documents, {repeat + 1} of {repeats}: {line}")
    return taken


def _rows(documents: int, median: dict[str, float]) -> list[dict[str, Any]]:
    goal = GOAL if documents == GOAL_DOCUMENTS else None
    size = f"{documents} documents x {DOCUMENT_TOKENS} tokens"
    return [
        row(f"TTFT, {size}, first use", median["stock cold"], median["spans cold"], "s"),
        row(
            f"TTFT, {size}, in a new order",
            median["stock warm"],
            median["spans warm"],
            "s",
            floor=median["stock floor"],
            goal=goal,
        ),
    ]
