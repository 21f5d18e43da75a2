"""Prevents: ranks that see different rows, or that rotate, gather or publish differently, under tensor parallelism."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engine.cases import documents, random_case
from tests.engine.harness import ORACLE_TOLERANCE, Engine, assert_same


@pytest.fixture(scope="module")
def two_ranks(tiny_model: str) -> Iterator[Engine]:
    """An engine of two worker processes with half of the heads each."""
    engine = Engine(tiny_model, tensor_parallel_size=2, distributed_executor_backend="mp")
    yield engine
    engine.close()


def test_two_ranks_answer_like_one(spans_engine: Engine, two_ranks: Engine) -> None:
    rng = random.Random(0)
    pool = documents(rng, 5)
    cases = [random_case(rng, pool) for _ in range(6)]
    policies = ("legolink", "none", "full")
    requests = [case.request(policies[i % 3]) for i, case in enumerate(cases)]
    requests += [case.plain() for case in cases[:2]]
    alone = [spans_engine.one(request) for request in requests]
    for turn in ("one by one, the cache filling up", "one by one, warm"):
        for request, expected in zip(requests, alone, strict=True):
            assert_same(expected, two_ranks.one(request), turn, ORACLE_TOLERANCE)
    assert two_ranks.one(requests[0])["cached"] > 0
    two_ranks.reset()
    for expected, got in zip(alone, two_ranks.many(requests), strict=True):
        assert_same(expected, got, "cold, in one batch", ORACLE_TOLERANCE)
