"""Prevents: answers that depend on what is loaded, a wait for files that do not pay, files that are read too late."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, tokens
from tests.engine.harness import Engine, assert_same
from tests.engine.states import STATES, reordered
from tests.offload.engines import (
    assert_nothing_left,
    block_files,
    connector,
    forget,
    moved,
    probe,
)
from tests.offload.test_inv1_tiers import expected_of
from vllm_spans.offload.cost import ENOUGH, FIRST_TRY


def policy(engine: Engine, name: str, **kwargs: Any) -> Any:
    """Call a function of ``tests.offload.policy_probes`` in the engine process."""
    return engine.call(f"tests.offload.policy_probes:{name}", **kwargs)


@pytest.fixture
def folder(files_folder: Path) -> Path:
    return files_folder.parent / "thrifty"


@pytest.fixture
def engine(engines: Any, tiny_model: str, folder: Path) -> Any:
    """Measures what loads cost; runs two requests at a time, so that others wait."""
    return engines.get(
        tiny_model,
        num_gpu_blocks_override=140,
        max_model_len=2048,
        max_num_batched_tokens=192,
        max_num_seqs=2,
        kv_transfer_config=connector(load_when="cheaper", cpu_memory="32MiB", files=str(folder)),
    )


def documents_of(seed: int, spans: int = 3) -> Case:
    rng = random.Random(seed)
    case = Case().prefix(tokens(rng, BLOCK))
    for _ in range(spans):
        case.span(tokens(rng, 4 * BLOCK))
    return case.cross(tokens(rng, 15))


Hang = Callable[[Engine, dict[str, Any], Path], None]


@pytest.fixture
def hang() -> Any:
    """Replaces a block's file by a pipe that nobody writes to, so that reading it never ends."""
    pipes: list[Path] = []

    def replace(engine: Engine, request: dict[str, Any], where: Path) -> None:
        key = probe(engine, "keys_of", request=request)[3]
        (path,) = (path for path in block_files(where) if path.stem.startswith(key))
        path.unlink()
        os.mkfifo(path)
        pipes.append(path)

    yield replace
    for path in pipes:
        # A writer that closes at once lets the reader go, if there is one.
        os.close(os.open(path, os.O_RDWR))
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "state",
    ["warm_from_another_order", "same_step", "full_batch", "evicted_in_the_middle", "preempted"],
)
def test_same_answer_whatever_is_loaded(spans_engine: Engine, engine: Engine, state: str) -> None:
    """Chance decides for each run of blocks, of requests with spans and without."""
    before = probe(engine, "counters")
    for seed in range(4):
        case, rng, how, expected = expected_of(spans_engine, seed, 5000)
        engine.one(reordered(case, rng).request(**how))
        engine.one(case.request(**how))
        forget(engine, cpu=bool(seed % 2))
        policy(engine, "choose_at_random", seed=seed)
        try:
            got = STATES[state](engine, case, rng, how)
            assert_same(expected, got, f"{state}, seed {seed}, {how}, {case.layout}")
            forget(engine, cpu=bool(seed % 2))
            plain = engine.one(case.plain())
        finally:
            policy(engine, "choose_again")
        spans_engine.reset()
        assert_same(spans_engine.one(case.plain()), plain, f"without spans, seed {seed}")
    counts = moved(engine, before)
    assert counts["declined_loads/cpu"] + counts["declined_loads/file"] > 0
    assert counts["reused_tokens/cpu"] + counts["reused_tokens/file"] > 0
    assert_nothing_left(engine)


@pytest.mark.parametrize("cpu", [False, True])
def test_nothing_is_loaded(
    spans_engine: Engine, stock_engine: Engine, engine: Engine, cpu: bool
) -> None:
    """All is in a tier, all of it is said to be cheaper to compute, and is computed."""
    case = documents_of(50)
    for request, reference in ((case.request(), spans_engine), (case.plain(), stock_engine)):
        reference.reset()
        expected = reference.one(request)
        engine.one(request)
        forget(engine, cpu=cpu)
        before = probe(engine, "counters")
        policy(engine, "choose_at_random", seed=0, share=0)
        try:
            got = engine.one(request)
        finally:
            policy(engine, "choose_again")
        assert_same(expected, got, "computed")
        assert got["cached"] == 0
        counts = moved(engine, before)
        assert counts[f"declined_loads/{'file' if cpu else 'cpu'}"] == len(case.tokens) // BLOCK
        assert counts.get("lookup_tokens") == counts.get("isolated_tokens")
    assert_nothing_left(engine)


def test_slow_files_are_given_up_and_tried_again(spans_engine: Engine, engine: Engine) -> None:
    """Measured: reading takes many times what computing takes."""
    case = documents_of(51)
    expected = spans_engine.one(case.request())
    assert_same(expected, engine.one(case.request()), "cold")

    def outcome() -> str:
        forget(engine, cpu=True)
        before = probe(engine, "counters")
        assert_same(expected, engine.one(case.request()), "slow files")
        counts = moved(engine, before)
        assert not [name for name in counts if "failures" in name]
        declined = counts.get("declined_loads/file", 0)
        assert declined in (0, len(case.tokens) // BLOCK)
        assert bool(declined) != bool(counts.get("reused_tokens/file"))
        return "computed" if declined else "loaded"

    policy(engine, "unlearn")
    policy(engine, "slow_reads", seconds=0.1)
    try:
        assert [outcome() for _ in range(ENOUGH)] == ["loaded"] * ENOUGH
        assert [outcome() for _ in range(FIRST_TRY - 1)] == ["computed"] * (FIRST_TRY - 1)
    finally:
        policy(engine, "restore_reads")
    assert outcome() == "loaded"
    assert_nothing_left(engine)


def test_given_rates_decide_before_files_are_read(
    engines: Any,
    tiny_model: str,
    spans_engine: Engine,
    stock_engine: Engine,
    tmp_path: Path,
    hang: Hang,
) -> None:
    """Files are said to be slow, and one of them hangs: nobody waits for it. CPU memory is used as ever."""
    engine = engines.get(
        tiny_model,
        kv_transfer_config=connector(
            load_when="cheaper",
            cpu_memory="32MiB",
            files=str(tmp_path),
            load_timeout=100,
            cpu_bandwidth="100GB",
            file_bandwidth="1KiB",
            recompute_tokens_per_second=1000,
        ),
    )
    case = documents_of(52)
    blocks = len(case.tokens) // BLOCK
    for request, reference in (
        (case.request(), spans_engine),
        (case.plain(), stock_engine),
    ):
        expected = reference.one(request)
        engine.one(request)
        forget(engine, cpu=True)
        hang(engine, request, tmp_path)
        before = probe(engine, "counters")
        assert_same(expected, engine.one(request), "slow files")
        counts = moved(engine, before)
        assert counts["declined_loads/file"] == blocks
        assert not [name for name in counts if "failures" in name or name == "reused_tokens/file"]
        forget(engine)
        before = probe(engine, "counters")
        again = engine.one(request)
        assert_same(expected, again, "from CPU memory")
        assert again["cached"] == blocks * BLOCK
        assert not [name for name in moved(engine, before) if "declined" in name]
    assert_nothing_left(engine)


def test_a_waiting_request_asks_once(engine: Engine, folder: Path, hang: Hang) -> None:
    case = documents_of(53)
    engine.one(case.request())
    forget(engine, cpu=True)
    policy(engine, "unlearn")
    hang(engine, case.request(), folder)
    counts = policy(engine, "count_questions", request=case.request(), steps=60)
    keys = len(case.tokens) // BLOCK
    assert counts[0] >= keys
    # Where the keys are, and then that their files are to be read; otherwise a question or two in a step.
    assert sum(counts) <= 8 * keys + 2 * len(counts)
    assert set(counts[-20:]) == {1}


def test_files_are_read_while_a_request_waits(spans_engine: Engine, engine: Engine) -> None:
    """Two requests hold the engine; the files of a third and a fourth are in CPU memory before either ends."""
    rng = random.Random(54)
    cases = [documents_of(540), documents_of(541)]
    requests = [cases[0].request(id="spans"), cases[1].plain(id="plain")]
    expected = []
    for request in requests:
        spans_engine.reset()
        expected.append(spans_engine.one(request))
        engine.one({**request, "id": "before"})
    forget(engine, cpu=True)
    busy = [{"id": f"busy{n}", "tokens": tokens(rng, 40), "max_tokens": 400} for n in range(2)]
    before = probe(engine, "counters")
    policy(engine, "slow_reads", seconds=0.003)
    try:
        seen = policy(engine, "run_queue", busy=busy, queue=requests)
    finally:
        policy(engine, "restore_reads")
    for blocks, case in zip(seen["ahead"], cases, strict=True):
        assert blocks == list(range(len(case.tokens) // BLOCK))
    assert 0 < seen["rows"] <= seen["room"]
    assert seen["pinned"] == 0, "a request that cannot run yet holds nothing"
    results = policy(engine, "finish", names=["spans", "plain"], abort=[])
    for request, answer in zip(requests, expected, strict=True):
        assert_same(answer, results[request["id"]], f"{request['id']}, read ahead")
    assert moved(engine, before)["reused_tokens/file"] > 0
    assert_nothing_left(engine)
    assert policy(engine, "free_room") == seen["room"]


def test_reading_ahead_takes_a_share_of_cpu_memory(cramped_engine: Engine) -> None:
    """Many requests wait, and CPU memory holds less than one; aborted ones give back what was taken for them."""
    engine, rng = cramped_engine, random.Random(55)
    queue = [documents_of(550 + n, 2).request(id=f"wait{n}") for n in range(5)]
    for request in queue:
        engine.one({**request, "id": "before"})
    forget(engine, cpu=True)
    busy = [{"id": f"busy{n}", "tokens": tokens(rng, 40), "max_tokens": 200} for n in range(4)]
    seen = policy(engine, "run_queue", busy=busy, queue=queue)
    assert seen["rows"] == seen["room"] > 0
    assert seen["pinned"] == 0
    results = policy(engine, "finish", names=["wait2", "wait4"], abort=["wait0", "wait1", "wait3"])
    assert all(result["outputs"] for result in results.values())
    assert_nothing_left(engine)
    assert policy(engine, "free_room") == seen["room"]
