"""Prevents: gap KV written into a block that another request reads."""

from __future__ import annotations

import random

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same

PROBE = "tests.engine.probes:kv_by_key"


def test_cached_blocks_never_change(spans_engine: Engine) -> None:
    """Bit for bit: requests that use spans leave the published blocks as they were."""
    rng = random.Random(21)
    pool = documents(rng, 4, (2, 5))
    first = random_case(rng, pool, max_spans=5, max_blocks=30)
    spans_engine.one(first.request())
    before = spans_engine.call(PROBE)
    for _ in range(4):
        cases = [random_case(rng, pool, max_spans=5, max_blocks=30) for _ in range(3)]
        spans_engine.many([case.request(max_tokens=rng.randint(2, 9)) for case in cases])
    after = spans_engine.call(PROBE)
    assert before
    assert {key: after[key] for key in before} == before


def test_one_span_at_two_positions_at_once(spans_engine: Engine) -> None:
    """Requests that run together and share spans at other offsets answer as they do alone."""
    rng = random.Random(22)
    text = tokens(rng, 6 * BLOCK)
    cases = [
        Case().span(text).cross(tokens(rng, 9)),
        Case().prefix(tokens(rng, BLOCK)).span(text).cross(tokens(rng, 40)),
        Case().prefix(tokens(rng, 7 * BLOCK)).span(text).span(text).cross(tokens(rng, 9)),
        Case().prefix(tokens(rng, 3 * BLOCK)).span(tokens(rng, 2 * BLOCK)).span(text),
    ]
    alone = []
    for case in cases:
        spans_engine.reset()
        alone.append(spans_engine.one(case.request(max_tokens=12)))
    for first_use in ("cold", "warm"):
        spans_engine.reset()
        if first_use == "warm":
            spans_engine.one(cases[1].request())
        requests = [case.request(max_tokens=12, at=i) for i, case in enumerate(cases)]
        together = spans_engine.many(requests)
        for index, (one, two) in enumerate(zip(alone, together, strict=True)):
            assert_same(one, two, f"request {index} among others, {first_use}")


def test_span_read_at_offset_zero_after_gaps(spans_engine: Engine) -> None:
    """At offset 0 a span has no gap: it reads the block that others replace by a gap of theirs."""
    rng = random.Random(23)
    text = tokens(rng, 4 * BLOCK)
    plain = Case().span(text).cross(tokens(rng, 10))
    spans_engine.reset()
    expected = spans_engine.one(plain.request())
    spans_engine.reset()
    for blocks in (3, 2, 5):
        behind = Case().prefix(tokens(rng, blocks * BLOCK)).span(text).cross(tokens(rng, 10))
        spans_engine.one(behind.request())
    got = spans_engine.one(plain.request())
    assert got["cached"] >= 3 * BLOCK
    assert_same(expected, got, "span at offset 0")
