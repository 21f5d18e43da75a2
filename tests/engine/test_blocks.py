"""Prevents: KV blocks, rows or requests that are never freed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same

HELD = "tests.engine.probes:held_blocks"
LEFT = "tests.engine.probes:leftovers"


def clean(engine: Engine, free: int) -> None:
    """Assert that an idle engine holds nothing."""
    assert engine.call(HELD) == []
    assert engine.free() == free
    left = engine.call(LEFT)
    assert left["requests"] == left["running"] == left["waiting"] == 0, left
    # One step may lie between a row's end and the worker dropping it.
    assert left["worker_requests"] <= 8, left


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("first", ["cold", "warm"])
def test_abort_in_the_middle_of_the_gaps(tiny_cache_engine: Engine, at: int, first: str) -> None:
    """Three spans of gaps per step at most, so the abort falls between gaps."""
    engine = tiny_cache_engine
    free = engine.free()
    rng = random.Random(70 + at)
    texts = [tokens(rng, 2 * BLOCK) for _ in range(16)]
    case = Case().prefix(tokens(rng, BLOCK))
    for text in texts:
        case.span(text)
    case.cross(tokens(rng, 20))
    if first == "warm":
        other = Case().prefix(tokens(rng, BLOCK))
        for text in texts[::-1]:
            other.span(text)
        engine.one(other.cross(tokens(rng, 5)).request())
    engine.run([case.request()], [{"at": at, "do": "abort", "ids": ["r0"]}])
    clean(engine, free)
    after = engine.one(case.request())
    engine.reset()
    assert_same(engine.one(case.request()), after, f"after an abort at step {at}")


def test_200_random_requests_with_aborts(tiny_cache_engine: Engine) -> None:
    """Block accounting returns to its start, and the engine still answers right."""
    engine = tiny_cache_engine
    free = engine.free()
    rng = random.Random(71)
    pool = documents(rng, 6, (1, 4))
    probe = random_case(rng, pool, max_spans=5, max_blocks=24).request()
    expected = engine.one(probe)
    for _ in range(4):
        requests: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        for index in range(50):
            case = random_case(rng, pool, max_spans=5, max_blocks=24)
            at = rng.randrange(120)
            extra = {"id": f"a{index}", "at": at, "max_tokens": rng.randint(1, 6)}
            requests.append(
                case.plain(**extra)
                if rng.random() < 0.2
                else case.request(rng.choice([None, "none"]), **extra)
            )
            if rng.random() < 0.4:
                events.append({"at": at + rng.randrange(12), "do": "abort", "ids": [f"a{index}"]})
        events += [
            {"at": rng.randrange(120), "do": rng.choice(["preempt", "reset_running"])}
            for _ in range(3)
        ]
        engine.run(requests, events, max_steps=8000)
        clean(engine, free)
    assert_same(expected, engine.one(probe), "after 200 requests")


def test_reset_while_spans_are_in_flight(spans_engine: Engine) -> None:
    """A reset is refused, or takes the running requests with it; both keep the answer."""
    rng = random.Random(72)
    case = random_case(rng, documents(rng, 4, (2, 4)), max_spans=6, max_blocks=30)
    free = spans_engine.free()
    expected = spans_engine.one(case.request(max_tokens=10))
    for at in (1, 2, 4):
        for kind in ("reset", "reset_running"):
            spans_engine.reset()
            requests = [case.request(max_tokens=10), case.request("none", max_tokens=10)]
            run = spans_engine.run(requests, [{"at": at, "do": kind}])
            assert run["events"] == [kind == "reset_running"]
            assert_same(expected, run["results"]["r0"], f"{kind} at {at}")
    clean(spans_engine, free)


def test_shared_spans_take_their_blocks_once(spans_engine: Engine) -> None:
    """Requests over the same documents in other orders share the span bodies."""
    rng = random.Random(73)
    texts = [tokens(rng, 5 * BLOCK) for _ in range(6)]

    def case() -> Case:
        made = Case().prefix(tokens(rng, BLOCK))
        for text in rng.sample(texts, len(texts)):
            made.span(text)
        return made.cross(tokens(rng, 10))

    spans_engine.one(case().request())
    events = [{"at": 6, "do": "usage"}]
    requests = [case().request(max_tokens=12) for _ in range(8)]
    usage = spans_engine.run(requests, events)["events"][0]
    used = round(usage * (spans_engine.about["num_gpu_blocks"] - 1))
    bodies, own = 6 * 4, 8 * (1 + 6 + 1)
    assert used <= bodies + own, f"{used} blocks in use for 8 requests"


def test_a_request_that_outgrows_the_cache_ends(engines: Any, tiny_model: str) -> None:
    """A lone request that finds no room for the isolated KV under its gap is ended, not left hanging."""
    engine = engines.get(tiny_model, num_gpu_blocks_override=40, max_model_len=1024)
    free = engine.free()
    rng = random.Random(72)
    case = Case().prefix(tokens(rng, BLOCK)).span(tokens(rng, 26 * BLOCK)).cross(tokens(rng, 36))
    request = case.request(policy="legolink", gap_length=8 * BLOCK, max_tokens=120)
    early = engine.run([request], [{"at": 20, "do": "reset_running"}], max_steps=400)
    assert len(early["results"]["r0"]["outputs"][0]["tokens"]) == 120, "there was room for it"
    late = engine.run([request], [{"at": 110, "do": "reset_running"}], max_steps=400)
    assert late["results"]["r0"]["outputs"][0]["finish"] == "error"
    clean(engine, free)
