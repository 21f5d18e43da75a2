"""Prevents: one cold span ending the reuse of all that follow."""

from __future__ import annotations

import random

import pytest

from tests.engine.cases import BLOCK, Case, tokens
from tests.engine.harness import Engine, assert_same

K = 32


def counted(engine: Engine, case: Case) -> tuple[dict[str, float], dict]:
    """Counter increments of one request, and its answer."""
    before = engine.counters()
    answer = engine.one(case.request())
    after = engine.counters()
    names = ("lookup", "reused", "isolated", "gap")
    keys = {name: f"vllm_spans_{name}_tokens_total" for name in names}
    return {n: after.get(k, 0) - before.get(k, 0) for n, k in keys.items()}, answer


@pytest.mark.parametrize("cold_ones", [{1}, {0}, {4}, {1, 3}, {0, 2, 4}])
def test_a_cold_span_costs_only_itself(spans_engine: Engine, cold_ones: set[int]) -> None:
    rng = random.Random(31)
    texts = [tokens(rng, BLOCK * n) for n in (4, 3, 5, 2, 4)]
    case = Case().prefix(tokens(rng, BLOCK))
    for text in texts:
        case.span(text)
    case.cross(tokens(rng, 15))
    expected = spans_engine.one(case.request())
    spans_engine.reset()
    warm = Case().prefix(tokens(rng, 2 * BLOCK))
    for index, text in enumerate(texts):
        if index not in cold_ones:
            warm.span(text)
    spans_engine.one(warm.cross(tokens(rng, 5)).request())
    counts, answer = counted(spans_engine, case)
    cold = sum(len(texts[i]) - K for i in cold_ones)
    body = sum(len(text) - K for text in texts)
    assert counts == {
        "lookup": body,
        "reused": body - cold,
        "isolated": cold,
        "gap": K * len(texts),
    }
    assert answer["cached"] == body - cold
    assert_same(expected, answer, f"cold spans {cold_ones}")


def test_evicted_blocks_inside_a_span_cost_only_themselves(spans_engine: Engine) -> None:
    """A hole inside a span is filled by running the span alone, not by giving the span up."""
    rng = random.Random(32)
    for seed in range(4):
        case = (
            Case()
            .prefix(tokens(rng, BLOCK))
            .span(tokens(rng, 6 * BLOCK))
            .span(tokens(rng, 6 * BLOCK))
        )
        case.cross(tokens(rng, 15))
        spans_engine.reset()
        expected = spans_engine.one(case.request())
        spans_engine.call("tests.engine.probes:evict_some", share=0.3, seed=seed)
        spans_engine.call("tests.engine.probes:scribble_free_blocks")
        counts, answer = counted(spans_engine, case)
        assert counts["lookup"] == counts["reused"] + counts["isolated"]
        assert_same(expected, answer, f"holes, seed {seed}")


def test_idle_counters_do_not_move(spans_engine: Engine) -> None:
    before = spans_engine.counters()
    spans_engine.one({"tokens": tokens(random.Random(33), 50)})
    after = spans_engine.counters()
    for name in ("lookup", "reused", "isolated", "gap"):
        key = f"vllm_spans_{name}_tokens_total"
        assert before.get(key, 0) == after.get(key, 0)
