"""TTFT over gap length, document length and context: stock cold and cached, spans cold and warm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.engine_process import Request
from benchmarks.gpu_parts import Pair
from benchmarks.gpu_sizes import Sizes
from benchmarks.report import Spread, say
from benchmarks.workloads import Corpus, unmarked

LONG = 100_000
"""A cold prompt longer than this takes stock so long that one measurement must do."""


def sweep(pair: Pair, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Points of the three curves, each as soon as it is measured.

    Stock vLLM does not see how tokens are divided into documents, so its times are measured once per prompt length.
    """
    corpus = Corpus("sweep", sizes.vocabulary)
    stock: dict[int, dict[str, Spread]] = {}

    def point(curve: str, x: int, count: int, length: int, **extra: Any) -> dict[str, Any]:
        tokens = count * length
        if tokens not in stock:
            stock[tokens] = _stock(pair, sizes, corpus, tokens)
        taken = stock[tokens] | _spans(pair, sizes, corpus, count, length, extra)
        entry = {
            "sweep": curve,
            "x": x,
            "documents": count,
            "length": length,
            "ms": {name: each.median for name, each in taken.items()},
            "spread": {name: [each.low, each.high] for name, each in taken.items()},
        }
        times = ", ".join(f"{name} {each.median:.1f}" for name, each in taken.items())
        say(f"{curve} {x}: {times} ms")
        return entry

    context = sizes.context_length
    for tokens in sizes.contexts:
        yield point("context", tokens, tokens // context, context)
    for gap in sizes.gaps:
        extra = {"span_gap_length": gap} if gap else {"span_gap_policy": "none"}
        yield point("gap length", gap, sizes.sweep_tokens // context, context, **extra)
    for length in sizes.lengths:
        yield point("document length", length, sizes.sweep_tokens // length, length)


def _stock(pair: Pair, sizes: Sizes, corpus: Corpus, tokens: int) -> dict[str, Spread]:
    def make(_: int) -> dict[str, Request]:
        fresh = corpus.request([corpus.tokens(tokens)])
        return {"stock cold": unmarked(fresh), "stock cached": corpus.other_question(fresh)}

    return pair.milliseconds(1 if tokens > LONG else sizes.sweep_repeats, make)


def _spans(
    pair: Pair, sizes: Sizes, corpus: Corpus, count: int, length: int, extra: dict[str, Any]
) -> dict[str, Spread]:
    def make(_: int) -> dict[str, Request]:
        documents = corpus.documents(count, length)
        return {
            "spans cold": corpus.request(documents, **extra),
            "spans warm": corpus.shuffled(documents, **extra),
        }

    return pair.milliseconds(sizes.sweep_repeats, make)
