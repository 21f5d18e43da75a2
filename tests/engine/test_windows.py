"""Prevents: a window that counts places in the cache instead of positions, and blocks freed behind one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same
from tests.engine.states import STATES, cold

# A window in every layer; windows beside full attention, with a base each; windows and sinks.
MODELS = ["mistral_window", "gemma3", "gpt_oss"]
POLICIES: list[dict[str, Any]] = [{}, {"policy": "none"}]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, model_path: Callable[[str], str]) -> str:
    """Each model's tests run one after the other, on two engines."""
    return model_path(request.param)


@pytest.fixture
def engine(engines: Any, model: str) -> Any:
    return engines.get(model, max_model_len=2048)


@pytest.fixture
def stock(engines: Any, model: str) -> Any:
    """With vLLM's own hybrid manager, which frees what lies outside the windows."""
    return engines.get(model, spans=False, max_model_len=2048)


def case_of(seed: int) -> tuple[Case, random.Random]:
    rng = random.Random(seed)
    return random_case(rng, documents(rng, 4), max_spans=6, max_blocks=24), rng


def test_same_answer_in_every_state(engine: Engine) -> None:
    for seed, how in enumerate(POLICIES):
        case, rng = case_of(1200 + seed)
        expected = cold(engine, case, rng, how)
        for state in STATES:
            got = STATES[state](engine, case, rng, how)
            assert_same(expected, got, f"{state}, {how}, {case.layout}")


def test_full_and_span_free_equal_stock(engine: Engine, stock: Engine) -> None:
    for seed in range(4):
        case, _ = case_of(1210 + seed)
        engine.one(case.request())
        expected = stock.one(case.plain(max_tokens=10))
        assert_same(expected, engine.one(case.request("full", max_tokens=10)), f"full, {seed}")
        assert_same(expected, engine.one(case.plain(max_tokens=10)), f"span-free, {seed}")
        assert_same(expected, engine.one(case.plain(max_tokens=10)), f"span-free, cached, {seed}")


def test_blocks_behind_the_window_are_kept(engine: Engine) -> None:
    """An answer that leaves the window far behind, and all spans are reused afterwards."""
    (group,) = engine.call("tests.engine.probes:cache_groups")
    assert group == "FullAttentionSpec"
    rng = random.Random(1220)
    a, b, c = (tokens(rng, 4 * BLOCK) for _ in range(3))
    first = Case().prefix(tokens(rng, BLOCK)).span(a).span(b).span(c).cross(tokens(rng, 20))
    second = Case().prefix(tokens(rng, 2 * BLOCK)).span(c).span(a).span(b).cross(tokens(rng, 20))
    held = engine.call("tests.engine.probes:blocks_held_after", steps=60, request=first.request())
    assert held == -(-(len(first.tokens) + 60) // BLOCK)
    expected = cold(engine, second, rng, {})
    engine.reset()
    engine.one(first.request(max_tokens=150))
    got = engine.one(second.request())
    assert got["cached"] == 3 * 3 * BLOCK
    assert_same(expected, got, "after a long answer")


def test_sinks_are_counted_once_whatever_the_threads(
    engines: Any, model_path: Callable[[str], str]
) -> None:
    """vLLM's CPU kernel splits a long row between threads, and a split may lie outside the window."""
    path = model_path("gpt_oss")
    rng = random.Random(1230)
    case = Case().span(tokens(rng, 8 * BLOCK)).cross(tokens(rng, 30))
    requests = [case.request(max_tokens=20), case.plain(max_tokens=20)]
    one = [engines.get(path, max_model_len=2048).one(request) for request in requests]
    two = Engine(path, env={"OMP_NUM_THREADS": "2"}, max_model_len=2048)
    try:
        for expected, request in zip(one, requests, strict=True):
            assert_same(expected, two.one(request), "two threads")
    finally:
        two.close()
