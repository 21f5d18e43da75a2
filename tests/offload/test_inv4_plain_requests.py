"""Prevents: a request without spans that is answered from approximate KV, or differently than by stock vLLM."""

from __future__ import annotations

import random

from tests.engine.cases import BLOCK, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same
from tests.engine.states import reordered
from tests.offload.engines import assert_nothing_left, forget, moved, probe


def test_plain_requests_equal_stock_from_every_tier(
    stock_engine: Engine, tiers_engine: Engine
) -> None:
    """Spans of the same tokens are in all tiers, and are not for them; their own prefixes are."""
    for seed in range(5):
        rng = random.Random(9000 + seed)
        case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
        longer = {"tokens": case.tokens[: 8 * BLOCK] + tokens(rng, 50)}
        stock_engine.reset()
        expected = stock_engine.one(case.plain())
        expected_longer = stock_engine.one(longer)
        tiers_engine.many([case.request(), reordered(case, rng).request()])
        for cpu in (False, True):
            forget(tiers_engine, cpu=cpu)
            assert_same(expected, tiers_engine.one(case.plain()), f"seed {seed}")
            forget(tiers_engine, cpu=cpu)
            again = tiers_engine.one(case.plain())
            assert_same(expected, again, f"loaded, seed {seed}")
            assert again["cached"] == (len(case.tokens) - 1) // BLOCK * BLOCK
            forget(tiers_engine, cpu=cpu)
            got = tiers_engine.one(longer)
            assert_same(expected_longer, got, f"a shared prefix, seed {seed}")
            assert got["cached"] >= min(8, len(case.tokens) // BLOCK) * BLOCK
    assert_nothing_left(tiers_engine)


def test_policy_full_equals_stock_from_every_tier(
    stock_engine: Engine, tiers_engine: Engine
) -> None:
    rng = random.Random(9100)
    case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
    expected = stock_engine.one(case.plain())
    for cpu in (False, True):
        for _ in range(2):
            assert_same(expected, tiers_engine.one(case.request("full")), "policy full")
            forget(tiers_engine, cpu=cpu)


def test_a_hole_ends_a_plain_prefix(stock_engine: Engine, tiers_engine: Engine) -> None:
    """What stands behind a hole is of no use to a request without spans, and is not loaded."""
    rng = random.Random(9200)
    request = {"tokens": tokens(rng, 12 * BLOCK + 5)}
    expected = stock_engine.one(request)
    tiers_engine.one(request)
    forget(tiers_engine)
    keys = probe(tiers_engine, "keys_of", request=request)
    probe(tiers_engine, "lose", keys=[keys[5]])
    before = probe(tiers_engine, "counters")
    got = tiers_engine.one(request)
    assert_same(expected, got, "a hole in a prefix")
    assert got["cached"] == 5 * BLOCK
    assert not [name for name in moved(tiers_engine, before) if "failures" in name]
    assert_nothing_left(tiers_engine)


def test_tenants_do_not_cross_in_any_tier(tiers_engine: Engine) -> None:
    """The salt is in the keys, and so in the names of the files."""
    rng = random.Random(9300)
    case = random_case(rng, documents(rng, 3, (3, 5)), max_spans=3, max_blocks=20)
    tiers_engine.one(case.request(salt="a"))
    for cpu in (False, True):
        forget(tiers_engine, cpu=cpu)
        fresh = f"b{cpu}"
        before = probe(tiers_engine, "counters")
        tiers_engine.one(case.request(salt=fresh))
        counts = moved(tiers_engine, before)
        assert not counts.get("reused_tokens/cpu") and not counts.get("reused_tokens/file")


def test_a_reset_finds_a_request_with_a_loaded_prefix(
    stock_engine: Engine, tiers_engine: Engine
) -> None:
    """Its blocks are in no job any more and cannot be taken from it: the reset is refused, and raises nothing."""
    rng = random.Random(9300)
    request = {"tokens": tokens(rng, 8 * BLOCK + 5)}
    expected = stock_engine.one(request)
    tiers_engine.one(request)
    forget(tiers_engine)
    answer = probe(tiers_engine, "reset_when_loaded", request={**request, "id": "loaded"})
    assert answer["reset"] is False
    assert_same(expected, answer["result"], "after the reset")
    forget(tiers_engine)
    assert_nothing_left(tiers_engine)
