"""Prevents: a block that is handed to another owner while the tiers still read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Engine, assert_same
from tests.offload.engines import assert_nothing_left, connector, forget, moved, probe
from tests.offload.test_inv1_tiers import expected_of

SEEDS = range(6)


@pytest.fixture
def engine(engines: Any, tiny_model: str, files_folder: Path) -> Any:
    """Its KV cache holds one or two requests, and a store ends several steps after the one that wrote its blocks."""
    engine = engines.get(
        tiny_model,
        num_gpu_blocks_override=46,
        max_model_len=1280,
        max_num_batched_tokens=192,
        max_num_seqs=4,
        kv_transfer_config=connector(cpu_memory="64MiB", policy="arc"),
    )
    if not engine.about.get("late_stores"):
        probe(engine, "late_stores", seconds=0.3)
        engine.about["late_stores"] = True
    return engine


def test_same_answer_from_what_was_stored_late(spans_engine: Engine, engine: Engine) -> None:
    cases = [expected_of(spans_engine, seed, 5000) for seed in SEEDS]
    free = engine.free()
    # One after the other in one run: each evicts what the one before has just computed.
    engine.run([case.request(**how, at=3 * at) for at, (case, _, how, _) in enumerate(cases)])
    forget(engine)
    before = probe(engine, "counters")
    for case, _, how, expected in cases:
        forget(engine)
        assert_same(expected, engine.one(case.request(**how)), str(case.layout))
    assert moved(engine, before).get("reused_tokens/cpu", 0) > 0
    assert_nothing_left(engine)
    assert engine.free() == free
