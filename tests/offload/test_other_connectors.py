"""Prevents: vLLM's own connectors answering a request with spans, storing blocks that are not written yet or not any
more, or giving K before its rotation to engines that take it for rotated."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import TOLERANCE, Engine, assert_same, difference
from tests.engine.states import reordered
from tests.http.server import Server
from tests.http.test_server import ask, logprobs
from tests.offload.engines import both, connector, forget, probe, stock_connector

OURS, STOCK = "SpansOffloadingConnector", "OffloadingConnector"

SETUPS: dict[str, Any] = {
    "stock": stock_connector("32MiB"),
    "ours first": both(connector(cpu_memory="32MiB"), stock_connector("32MiB")),
    "stock first": both(stock_connector("32MiB"), connector(cpu_memory="32MiB")),
}


@pytest.fixture(params=sorted(SETUPS))
def setup(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(engines: Any, tiny_model: str, setup: str) -> Any:
    """An engine whose KV cache holds two or three requests; connectors are as they were.

    It plans a step while the one before runs, so that connectors learn of things late.
    """
    return engines.get(
        tiny_model,
        setup="tests.engine.probes:allow_async_scheduling",
        async_scheduling=True,
        num_gpu_blocks_override=48,
        max_model_len=1500,
        max_num_batched_tokens=192,
        max_num_seqs=4,
        kv_transfer_config=SETUPS[setup],
    )


def assert_nothing_left(engine: Engine, free: int) -> None:
    left = probe(engine, "left_in_connectors")
    assert left and not any(left.values()), left
    assert engine.free() == free


def test_the_same_answers_as_without_connectors(
    spans_engine: Engine, stock_engine: Engine, engine: Engine, setup: str
) -> None:
    """Requests with and without spans over the same tokens, cold, then with nothing left in the KV cache."""
    free = engine.free()
    for seed in range(3):
        rng = random.Random(5000 + seed)
        case = random_case(rng, documents(rng, 4), max_spans=4, max_blocks=20)
        plain, spans = case.plain(), case.request(salt=f"{setup} {seed}")
        whole = (len(case.tokens) - 1) // BLOCK * BLOCK
        spans_engine.reset()
        expected = spans_engine.one(spans)
        expected_plain = stock_engine.one(plain)
        for turn in range(2):
            for request, answer in ((plain, expected_plain), (spans, expected)):
                forget(engine)
                probe(engine, "watch_loads")
                got = engine.one(request)
                assert_same(answer, got, f"{setup}, seed {seed}, turn {turn}")
                loaded = probe(engine, "loaded")
                if not turn:
                    continue
                if request is plain:
                    # vLLM's own loads a last full block too, and computes its last token again.
                    assert loaded == (
                        {OURS: whole // BLOCK}
                        if setup == "ours first"
                        else {STOCK: len(case.tokens) // BLOCK}
                    )
                    assert got["cached"] >= whole
                elif setup == "stock":
                    assert not loaded and not got["cached"], "it knows prefixes only"
                else:
                    assert set(loaded) == {OURS}
                    assert got["cached"] == whole
        longer = {"tokens": case.tokens[: 3 * BLOCK] + tokens(rng, 40)}
        forget(engine)
        assert_same(stock_engine.one(longer), engine.one(longer), f"a prefix, seed {seed}")
        assert_nothing_left(engine, free)


def crowd(seed: int) -> list[dict[str, Any]]:
    """Requests with and without spans that share documents and prefixes, more than the KV cache holds."""
    rng = random.Random(seed)
    pool = documents(rng, 5, (1, 4))
    requests = []
    for _ in range(12):
        case = random_case(rng, pool, max_spans=3, max_blocks=14)
        extra = {"at": rng.randrange(30), "max_tokens": rng.randint(1, 30)}
        plain = rng.random() < 0.5
        requests.append(case.plain(**extra) if plain else reordered(case, rng).request(**extra))
    return requests


def test_a_crowd_in_a_small_kv_cache(spans_engine: Engine, engine: Engine, setup: str) -> None:
    """Blocks change hands in every step, between rows, loads and stores of all connectors; some are aborted."""
    free = engine.free()
    for seed in range(2):
        requests = crowd(6000 + seed)
        aborted = f"r{seed}"
        expected = []
        for request in requests:
            spans_engine.reset()
            expected.append(spans_engine.one({**request, "at": 0}))
        probe(engine, "watch_loads")
        for turn in range(2):
            events = [{"at": 10 * turn + 5, "do": "abort", "ids": [aborted]}]
            events.append({"at": 12, "do": "preempt"})
            run = engine.run(requests, events)
            for number, answer in enumerate(expected):
                name = f"r{number}"
                if name != aborted:
                    why = f"{setup}, seed {seed}, turn {turn}, request {number}"
                    assert_same(answer, run["results"][name], why)
            assert_nothing_left(engine, free)
        expected_loads = {"stock": {STOCK}, "ours first": {OURS}, "stock first": {OURS, STOCK}}
        assert expected_loads[setup] <= set(probe(engine, "loaded"))


@pytest.mark.parametrize("told", [True, False])
def test_a_block_is_stored_before_rows_write_to_it(
    spans_engine: Engine, engine: Engine, setup: str, told: bool
) -> None:
    """A request ends, and rows take its last block in the step after which it would be stored.

    Not told of the new owner, the connector stores what the rows wrote: so the test can see it. Where our connector is
    the first, it has stored the block before, and is the one that is asked.
    """
    rng = random.Random(7000)
    case = Case().span(tokens(rng, 14 * BLOCK)).span(tokens(rng, 14 * BLOCK)).cross([5, 6])
    # The last block is full with the last token but one, of which vLLM learns when the request has ended.
    plain = {"tokens": tokens(rng, 43 * BLOCK - 5), "max_tokens": 6}
    (output,) = spans_engine.one(plain)["outputs"]
    longer = {"tokens": plain["tokens"] + output["tokens"] + tokens(rng, 7)}
    expected = spans_engine.one(longer)
    forget(engine, cpu=True)
    if not told:
        probe(engine, "hide_taken_blocks")
    try:
        engine.run([plain, case.request("none", at=4)])
        forget(engine)
        got = engine.one(longer)
        assert got["cached"] >= 42 * BLOCK
        worst = difference(expected, got)
    finally:
        if not told:
            probe(engine, "show_taken_blocks")
            forget(engine, cpu=True)
    if told:
        assert worst <= TOLERANCE
    elif setup != "ours first":
        assert worst > 100 * TOLERANCE


def test_a_preempted_request_has_no_blocks(engine: Engine) -> None:
    """It may end before it runs again: what it had is not stored as what it would have got."""
    rng = random.Random(7100)
    case = Case().span(tokens(rng, 4 * BLOCK)).span(tokens(rng, 4 * BLOCK)).cross([5, 6])
    request = case.request("none", max_tokens=30)
    assert probe(engine, "known_blocks", request=request) == {STOCK: [9, 0, 9]}


def test_no_key_equals_one_of_a_stock_engine(spans_engine: Engine, stock_engine: Engine) -> None:
    """Stores that are keyed by block hashes may be shared with stock engines: neither finds what is the other's."""
    request = {"tokens": tokens(random.Random(1), 6 * BLOCK)}
    keys = [
        set(engine.call("tests.offload.probes:keys_of", request=request))
        for engine in (spans_engine, stock_engine)
    ]
    assert len(keys[0]) == len(keys[1]) == 6
    assert not keys[0] & keys[1]


@pytest.mark.slow
def test_a_server_with_connectors_side_by_side(tiny_model: str) -> None:
    """Scheduler, worker and metrics are in different processes there, and tell connectors apart by name."""
    rng = random.Random(7200)
    case = random_case(rng, documents(rng, 3, (3, 4)), max_spans=3)
    server = Server(
        tiny_model,
        f"--kv-transfer-config={json.dumps(SETUPS['stock first'])}",
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    kinds: tuple[dict[str, Any], ...] = ({}, {"vllm_xargs": {}})
    try:
        expected = [logprobs(ask(server, case, **kind)) for kind in kinds]
        end = time.monotonic() + 30
        while not server.post("/reset_prefix_cache", {}).json()["success"]:
            assert time.monotonic() < end, "the connectors never come to rest"
        again = [logprobs(ask(server, case, **kind)) for kind in kinds]
        for before, after in zip(expected, again, strict=True):
            assert before == pytest.approx(after, abs=TOLERANCE)
        seen = server.wait_idle()
        assert seen["vllm_spans_reused_tokens_total"] > 0
        assert seen["vllm:external_prefix_cache_hits_total"] >= len(case.tokens) // BLOCK * BLOCK
    finally:
        server.close()
