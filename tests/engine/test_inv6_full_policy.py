"""Prevents: a policy `full` that is not exact, and so cannot be the oracle of the others."""

from __future__ import annotations

import random

from tests.engine.cases import documents, random_case
from tests.engine.harness import Engine, assert_same


def test_full_equals_stock(spans_engine: Engine, stock_engine: Engine) -> None:
    for seed in range(6):
        rng = random.Random(600 + seed)
        case = random_case(rng, documents(rng, 4), max_spans=6, max_blocks=30)
        stock = stock_engine.one(case.plain(max_tokens=10))
        got = spans_engine.one(case.request("full", max_tokens=10))
        assert_same(stock, got, f"seed {seed}")
        again = spans_engine.one(case.request("full", max_tokens=10))
        assert again["cached"] == stock_engine.one(case.plain(max_tokens=10))["cached"]
        assert_same(stock, again, f"seed {seed}, warm")


def test_full_after_approximate_requests(spans_engine: Engine, stock_engine: Engine) -> None:
    for seed in range(3):
        rng = random.Random(650 + seed)
        case = random_case(rng, documents(rng, 4), max_spans=6, max_blocks=30)
        spans_engine.many([case.request("legolink"), case.request("none")])
        got = spans_engine.one(case.request("full"))
        assert_same(stock_engine.one(case.plain()), got, f"seed {seed}")
