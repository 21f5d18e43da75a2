"""Prevents: KV computed under an approximation answering a request that asked for none."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.cases import BLOCK, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same


def test_span_free_requests_equal_stock(spans_engine: Engine, stock_engine: Engine) -> None:
    """Tokens, log-probabilities and cache hits of ordinary traffic with shared prefixes."""
    rng = random.Random(41)
    stem = tokens(rng, 5 * BLOCK + 7)
    waves: list[list[dict[str, Any]]] = []
    for _ in range(4):
        wave = []
        for _ in range(5):
            cut = rng.choice([0, rng.randint(1, len(stem)), len(stem)])
            text = stem[:cut] + tokens(rng, rng.randint(1, 200))
            wave.append({"tokens": text, "max_tokens": rng.randint(1, 40), "at": rng.randrange(5)})
        waves.append(wave)
    waves += [waves[0], waves[2]]
    for number, wave in enumerate(waves):
        for ours, stock in zip(spans_engine.many(wave), stock_engine.many(wave), strict=True):
            assert ours["cached"] == stock["cached"], f"wave {number}"
            assert_same(stock, ours, f"wave {number}")


def test_span_free_after_spans_equals_stock(spans_engine: Engine, stock_engine: Engine) -> None:
    """The same tokens, first with spans and then without: only KV with full context may be hit."""
    for seed in range(6):
        rng = random.Random(400 + seed)
        pool = documents(rng, 4)
        case = random_case(rng, pool, max_spans=5, max_blocks=30)
        spans_engine.reset()
        stock_engine.reset()
        for policy in ("legolink", "none"):
            spans_engine.one(case.request(policy))
        prefix = case.span_starts[0]
        # At offset 0 of an empty prefix a span's own KV is the exact one.
        exact = prefix or len(case.bodies[0])
        ours = spans_engine.one(case.plain())
        assert ours["cached"] <= exact, f"seed {seed}: {ours['cached']} tokens of approximate KV"
        assert_same(stock_engine.one(case.plain()), ours, f"seed {seed}")
        again = spans_engine.one(case.plain())
        assert again["cached"] == stock_engine.one(case.plain())["cached"]


def test_spans_after_span_free(spans_engine: Engine) -> None:
    """Exact KV of the same tokens must not change a span request's answer either."""
    for seed in range(4):
        rng = random.Random(450 + seed)
        case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
        spans_engine.reset()
        expected = spans_engine.one(case.request())
        spans_engine.reset()
        spans_engine.one(case.plain())
        assert_same(expected, spans_engine.one(case.request()), f"seed {seed}")


def test_policies_do_not_share_contextual_blocks(spans_engine: Engine) -> None:
    """Gap and cross blocks of one policy are another's wrong KV; so are those of another layout."""
    for seed in range(4):
        rng = random.Random(470 + seed)
        case = random_case(rng, documents(rng, 4, (2, 4)), max_spans=5, max_blocks=30)
        hows: list[dict[str, Any]] = [
            {"policy": "none"},
            {"policy": "legolink", "gap_length": 32},
            {"policy": "legolink", "gap_length": 64},
            {"policy": "full"},
        ]
        alone = []
        for how in hows:
            spans_engine.reset()
            alone.append(spans_engine.one(case.request(**how)))
        rng.shuffle(order := list(range(len(hows))))
        spans_engine.reset()
        for index in order + order:
            got = spans_engine.one(case.request(**hows[index]))
            assert_same(alone[index], got, f"seed {seed}, {hows[index]} after others")


def test_same_tokens_other_layout(spans_engine: Engine) -> None:
    """Where the spans are is part of what the KV after them depends on."""
    rng = random.Random(48)
    text = tokens(rng, 9 * BLOCK + 10)
    layouts = [[BLOCK], [2 * BLOCK], [BLOCK, 2 * BLOCK], [BLOCK, 4 * BLOCK], [0, 4 * BLOCK]]
    requests = [
        {"tokens": text, "span_starts": starts, "cross_span_starts": [8 * BLOCK]}
        for starts in layouts
    ]
    alone = []
    for request in requests:
        spans_engine.reset()
        alone.append(spans_engine.one(request))
    spans_engine.reset()
    for request, expected in zip(requests * 2, alone * 2, strict=True):
        assert_same(expected, spans_engine.one(request), f"layout {request['span_starts']}")


def test_a_conversation_grows(spans_engine: Engine) -> None:
    """A later span changes no key before it, so a growing conversation keeps its history."""
    rng = random.Random(49)
    case = random_case(rng, documents(rng, 3, (2, 3)), max_spans=3, max_blocks=20)
    case.tokens += tokens(rng, -len(case.tokens) % BLOCK)
    first = spans_engine.one(case.request())
    assert first["cached"] == 0
    history = len(case.tokens)
    case.span(tokens(rng, 3 * BLOCK)).cross(tokens(rng, 20))
    grown = spans_engine.one(case.request())
    # The last block before the new span ended the first prompt, so it was contextual there too.
    assert grown["cached"] >= history - BLOCK
    spans_engine.reset()
    assert_same(spans_engine.one(case.request()), grown, "grown conversation")
