"""Prevents: a request that never finishes because its segments do not fit a step's budget."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same


def test_256_spans_in_small_steps(engines: Any, tiny_model: str, oracle_for: Any) -> None:
    """256 spans of 32 gap tokens each, with 512 tokens and 4 rows a step, cold and warm."""
    engine = engines.get(
        tiny_model, max_model_len=20480, max_num_batched_tokens=512, max_num_seqs=4
    )
    rng = random.Random(61)
    texts = [tokens(rng, 2 * BLOCK) for _ in range(256)]
    case = Case().prefix(tokens(rng, BLOCK))
    for text in texts:
        case.span(text)
    case.cross(tokens(rng, 20))
    warm_up = Case()
    for text in texts[::-1]:
        warm_up.span(text)
    warm_up.cross(tokens(rng, 20))
    cold = engine.run([case.request()], max_steps=3000)
    engine.reset()
    engine.run([warm_up.request()], max_steps=3000)
    warm = engine.run([case.request()], max_steps=1000)
    assert warm["results"]["r0"]["cached"] == 256 * BLOCK
    assert_same(cold["results"]["r0"], warm["results"]["r0"], "256 spans")


def test_256_spans_do_not_starve_others(engines: Any, tiny_model: str) -> None:
    """Short requests that arrive during the gaps are served, and answer as they do alone."""
    engine = engines.get(
        tiny_model, max_model_len=20480, max_num_batched_tokens=512, max_num_seqs=4
    )
    rng = random.Random(62)
    case = Case().prefix(tokens(rng, BLOCK))
    for _ in range(64):
        case.span(tokens(rng, BLOCK))
    case.cross(tokens(rng, 20))
    short = [tokens(rng, rng.randint(5, 60)) for _ in range(6)]
    alone = []
    for text in short:
        engine.reset()
        alone.append(engine.one({"tokens": text}))
    engine.reset()
    expected = engine.one(case.request())
    engine.reset()
    requests = [case.request(), *({"tokens": t, "at": 1 + i} for i, t in enumerate(short))]
    results = engine.many(requests, max_steps=2000)
    assert_same(expected, results[0], "the long one")
    for one, two in zip(alone, results[1:], strict=True):
        assert_same(one, two, "a short one")


@pytest.mark.parametrize(("batched", "seqs"), [(64, 2), (256, 8)])
def test_long_random_workload(
    engines: Any, spans_engine: Engine, tiny_model: str, batched: int, seqs: int
) -> None:
    """Small budgets, a small cache, priorities, aborts and preemption at once."""
    engine = engines.get(
        tiny_model,
        num_gpu_blocks_override=80,
        max_model_len=1536,
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        scheduling_policy="priority",
    )
    free = engine.free()
    rng = random.Random(batched)
    pool = documents(rng, 6, (1, 4))
    requests: list[dict[str, Any]] = []
    for index in range(40):
        common = {
            "id": f"q{index}",
            "at": rng.randrange(150),
            "max_tokens": rng.randint(1, 24),
            "priority": rng.randrange(3),
            "salt": rng.choice([None, None, "s"]),
        }
        if rng.random() < 0.25:
            requests.append({"tokens": tokens(rng, rng.randint(3, 300)), **common})
        else:
            case = random_case(rng, pool, max_spans=5, max_blocks=24)
            policy = rng.choice([None, None, "none", "full"])
            requests.append(case.request(policy, **common))
    events: list[dict[str, Any]] = [
        {"at": rng.randrange(150), "do": "abort", "ids": [f"q{rng.randrange(40)}"]}
        for _ in range(5)
    ]
    events += [{"at": rng.randrange(150), "do": "preempt"} for _ in range(5)]
    aborted = {i for e in events for i in e.get("ids", [])}
    results = engine.run(requests, events, max_steps=6000)["results"]
    assert engine.free() == free
    for request in requests[::2]:
        result = results[request["id"]]
        if request["id"] in aborted:
            continue
        spans_engine.reset()
        expected = spans_engine.one({**request, "at": 0})
        assert_same(expected, result, request["id"])
    assert sum(bool(r.get("outputs")) for r in results.values()) >= len(requests) - len(aborted)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 97])
def test_edges_of_a_prompt(tiny_cache_engine: Engine, spans_engine: Engine, length: int) -> None:
    """Prompts that end at, before and after a block border, with a span that covers them whole."""
    rng = random.Random(length)
    text = tokens(rng, length)
    request = {"tokens": text, "span_starts": list(range(0, length, BLOCK))}
    one, two = spans_engine.one(request), tiny_cache_engine.one(request)
    assert_same(one, two, f"{length} tokens")
    assert_same(one, spans_engine.one(request), f"{length} tokens, warm")


def test_gaps_in_a_full_pool(tiny_cache_engine: Engine, spans_engine: Engine) -> None:
    """A prompt that needs the whole pool goes through; one that could never fit is refused by name."""
    rng = random.Random(67)
    case = Case().prefix(tokens(rng, BLOCK))
    for _ in range(3):
        case.span(tokens(rng, 12 * BLOCK))
    case.cross(tokens(rng, 70))
    for gap_length, fits in ((32, True), (96, True), (256, False)):
        request = case.request("legolink", gap_length, max_tokens=4)
        requests = [request, {**request, "salt": "other"}, {"tokens": tokens(rng, 40)}]
        for _ in range(2):
            results = tiny_cache_engine.many(requests, max_steps=2000)
            if fits:
                assert_same(spans_engine.one(request), results[0], f"gap {gap_length}")
                assert_same(results[0], results[1], f"gap {gap_length}, other salt")
            else:
                assert "KV blocks" in results[0]["error"]
            assert results[2]["outputs"]
