"""Prevents: spans that are right only under the scheduler that is not the default on GPUs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.cases import documents, random_case, tokens
from tests.engine.harness import Engine, assert_same
from tests.engine.states import STATES

SETUP = "tests.engine.probes:allow_async_scheduling"


@pytest.fixture
def async_engine(engines: Any, tiny_model: str) -> Engine:
    """Steps overlap: the next one is scheduled before the last one's tokens are known."""
    engine: Engine = engines.get(
        tiny_model,
        setup=SETUP,
        async_scheduling=True,
        num_gpu_blocks_override=80,
        max_model_len=1536,
        max_num_batched_tokens=256,
        max_num_seqs=6,
    )
    assert engine.about["async_scheduling"]
    assert "vllm_spans.core.scheduler.SpanAsyncScheduler" in engine.about["scheduler"]
    return engine


@pytest.mark.parametrize("state", sorted(STATES))
def test_states(async_engine: Engine, spans_engine: Engine, state: str) -> None:
    for seed in range(4):
        rng = random.Random(1100 + seed)
        case = random_case(rng, documents(rng, 5), max_spans=5, max_blocks=24)
        how = [{}, {"policy": "none"}, {"gap_length": 64}][seed % 3]
        spans_engine.reset()
        expected = spans_engine.one(case.request(**how))
        got = STATES[state](async_engine, case, rng, how)
        assert_same(expected, got, f"{state}, seed {seed}, {how}")


def test_random_workload_with_aborts(async_engine: Engine, spans_engine: Engine) -> None:
    free = async_engine.free()
    rng = random.Random(1150)
    pool = documents(rng, 6, (1, 4))
    requests: list[dict[str, Any]] = []
    for index in range(50):
        common = {"id": f"q{index}", "at": rng.randrange(80), "max_tokens": rng.randint(1, 24)}
        if rng.random() < 0.2:
            requests.append({"tokens": tokens(rng, rng.randint(3, 300)), **common})
        else:
            case = random_case(rng, pool, max_spans=5, max_blocks=24)
            requests.append(case.request(rng.choice([None, None, "none", "full"]), **common))
    events: list[dict[str, Any]] = [
        {"at": rng.randrange(80), "do": "abort", "ids": [f"q{rng.randrange(50)}"]}
        for _ in range(10)
    ]
    events += [
        {"at": rng.randrange(80), "do": rng.choice(["preempt", "reset_running"])} for _ in range(6)
    ]
    aborted = {i for e in events for i in e.get("ids", [])}
    results = async_engine.run(requests, events, max_steps=6000)["results"]
    assert async_engine.free() == free
    assert async_engine.call("tests.engine.probes:held_blocks") == []
    for request in requests[::2]:
        if request["id"] not in aborted:
            spans_engine.reset()
            expected = spans_engine.one({**request, "at": 0})
            assert_same(expected, results[request["id"]], request["id"])
