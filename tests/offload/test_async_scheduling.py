"""Prevents: a block that a step in flight still writes being given to a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Engine, assert_same
from tests.engine.states import STATES
from tests.offload.engines import assert_nothing_left, connector, probe
from tests.offload.test_inv1_tiers import expected_of


@pytest.fixture
def engine(engines: Any, tiny_model: str, files_folder: Path) -> Any:
    """Plans a step while the one before runs."""
    return engines.get(
        tiny_model,
        setup="tests.engine.probes:allow_async_scheduling",
        async_scheduling=True,
        num_gpu_blocks_override=120,
        max_model_len=2048,
        max_num_batched_tokens=192,
        max_num_seqs=6,
        kv_transfer_config=connector(
            cpu_memory="64MiB", files=str(files_folder.parent / "asynchronous")
        ),
    )


@pytest.mark.parametrize("state", ["full_batch", "preempted", "same_step", "evicted_in_the_middle"])
def test_same_answer_with_async_scheduling(
    spans_engine: Engine, engine: Engine, state: str
) -> None:
    assert engine.about["async_scheduling"]
    for seed in range(4):
        case, rng, how, expected = expected_of(spans_engine, seed, 700)
        for _ in range(2):
            got = STATES[state](engine, case, rng, how)
            assert_same(expected, got, f"{state}, seed {seed}, {how}, {case.layout}")
    assert probe(engine, "counters")["vllm_spans_reused_tokens_total/cpu"] > 0
    assert_nothing_left(engine)


def test_block_accounting_follows_the_rows(spans_engine: Engine, engine: Engine) -> None:
    """vLLM's count of steps that were planned and of those that ended stay equal, whoever planned them."""
    case, _, how, expected = expected_of(spans_engine, 3, 800)
    free = engine.free()
    run = engine.run(
        [case.request(**how), case.request(**how, at=2), case.request(**how, at=3)],
        [{"at": 3, "do": "abort", "ids": ["r1"]}],
    )
    assert_same(expected, run["results"]["r0"], "beside an abort")
    assert_same(expected, run["results"]["r2"], "after an abort")
    assert engine.free() == free
    planned, ended = probe(engine, "step_counts")
    assert planned == ended > 0
