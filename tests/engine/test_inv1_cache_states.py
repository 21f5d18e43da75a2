"""Prevents: an answer that depends on the cache, on preemption, or on the rest of the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same
from tests.engine.states import STATES, cold, reordered

SEEDS = range(6)
POLICIES: list[dict[str, Any]] = [
    {},
    {"policy": "none"},
    {"policy": "legolink", "gap_length": 64},
]


def case_of(seed: int, **limits: int) -> tuple[Case, random.Random]:
    rng = random.Random(seed)
    return random_case(rng, documents(rng, 5), **limits), rng


@pytest.mark.parametrize("state", [s for s in STATES if s != "cold"])
def test_same_answer_in_every_state(spans_engine: Engine, state: str) -> None:
    for seed in SEEDS:
        case, rng = case_of(seed)
        how = POLICIES[seed % len(POLICIES)]
        expected = cold(spans_engine, case, rng, how)
        got = STATES[state](spans_engine, case, rng, how)
        assert_same(expected, got, f"{state}, seed {seed}, {how}, {case.layout}")


def test_reset_engine_answers_like_a_fresh_one(spans_engine: Engine, tiny_model: str) -> None:
    """The cold reference of all other tests, checked against a process that never ran anything."""
    expected = []
    for seed in SEEDS:
        case, rng = case_of(100 + seed)
        expected.append(cold(spans_engine, case, rng, POLICIES[seed % 3]))
    fresh = Engine(tiny_model)
    try:
        for seed, reference in zip(SEEDS, expected, strict=True):
            case, _ = case_of(100 + seed)
            got = fresh.one(case.request(**POLICIES[seed % 3]))
            assert_same(reference, got, f"fresh engine, seed {seed}")
    finally:
        fresh.close()


def test_warm_requests_do_reuse(spans_engine: Engine) -> None:
    """Without this, the tests above could pass by never reusing anything."""
    rng = random.Random(3)
    a, b, c = (tokens(rng, 4 * BLOCK) for _ in range(3))
    first = Case().prefix(tokens(rng, BLOCK)).span(a).span(b).span(c).cross(tokens(rng, 20))
    second = Case().prefix(tokens(rng, 2 * BLOCK)).span(c).span(a).span(b).cross(tokens(rng, 20))
    assert spans_engine.one(first.request())["cached"] == 0
    assert spans_engine.one(second.request())["cached"] == 3 * 3 * BLOCK
    # A repeated request hits its prefix, its gaps and its cross blocks as well.
    assert spans_engine.one(second.request())["cached"] == len(second.tokens) // BLOCK * BLOCK


def compare_alone(engine: Engine, requests: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Each answer of a crowded run against the same request alone on an empty cache."""
    for index, request in enumerate(requests):
        engine.reset()
        expected = engine.one({**request, "at": 0})
        assert_same(expected, run["results"][f"r{index}"], f"request {index}")


@pytest.mark.parametrize("seed", range(3))
def test_tiny_cache(spans_engine: Engine, tiny_cache_engine: Engine, seed: int) -> None:
    """Real eviction: many requests over a pool that holds two or three of them."""
    rng = random.Random(1000 + seed)
    pool = documents(rng, 6, (1, 5))
    requests = [
        random_case(rng, pool, max_spans=4, max_blocks=20).request(
            **POLICIES[seed % 3], max_tokens=rng.randint(3, 60), at=rng.randrange(20)
        )
        for _ in range(8)
    ]
    compare_alone(spans_engine, requests, tiny_cache_engine.run(requests))


def test_preempted_by_growth(spans_engine: Engine, tiny_cache_engine: Engine) -> None:
    """Real preemption: four answers grow until the pool holds three; one comes back, with its spans."""
    rng = random.Random(1010)
    shared = tokens(rng, 2 * BLOCK)
    requests = []
    for how in [*POLICIES, {}]:
        case = Case().prefix(tokens(rng, BLOCK)).span(tokens(rng, 3 * BLOCK)).span(shared)
        requests.append(case.span(tokens(rng, 3 * BLOCK)).cross(tokens(rng, 9)).request(**how))
    for request in requests:
        request["max_tokens"] = 200
    run = tiny_cache_engine.run(requests)
    assert run["preemptions"] > 0, "the pool is too large for this test"
    compare_alone(spans_engine, requests, run)


def test_same_span_twice_in_one_prompt(spans_engine: Engine) -> None:
    rng = random.Random(8)
    text, other = tokens(rng, 5 * BLOCK), tokens(rng, 2 * BLOCK)
    case = Case().prefix(tokens(rng, BLOCK)).span(text).span(text).span(other).span(text)
    case.cross(tokens(rng, 21))
    for how in POLICIES:
        expected = cold(spans_engine, case, rng, how)
        for state in ("warm", "warm_from_another_order", "evicted_in_the_middle"):
            assert_same(expected, STATES[state](spans_engine, case, rng, how), f"{state} {how}")


def test_one_key_means_one_content(spans_engine: Engine) -> None:
    """Two unrelated histories leave, under every key they share, the same KV.

    This sees contextual KV under a context-free key even where no later request would read it.
    """
    rng = random.Random(9)
    pool = documents(rng, 6, (2, 6))
    cases = [random_case(rng, pool, max_spans=5, max_blocks=30) for _ in range(6)]
    histories = []
    for order in (cases, cases[::-1]):
        spans_engine.reset()
        for case in order:
            spans_engine.many([case.request(), reordered(case, rng).request()])
            spans_engine.call("tests.engine.probes:evict_some", share=0.1, seed=rng.randrange(999))
        histories.append(spans_engine.call("tests.engine.probes:kv_by_key"))
    first, second = histories
    shared = first.keys() & second.keys()
    assert len(shared) > 20
    for key in shared:
        for one, two in zip(first[key], second[key], strict=True):
            assert abs(one - two) <= 1e-3, f"block {key}: {one} and {two}"
