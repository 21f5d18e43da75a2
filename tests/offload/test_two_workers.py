"""Prevents: workers under tensor parallelism whose parts of a block come back to the wrong place, or one without the
other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.cases import BLOCK
from tests.engine.harness import ORACLE_TOLERANCE, Engine, assert_same
from tests.engine.states import reordered
from tests.offload.engines import assert_nothing_left, connector, forget, moved, probe
from tests.offload.test_inv1_tiers import expected_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two-workers")


@pytest.fixture(scope="module")
def two_workers(tiny_model: str, files: Path) -> Iterator[Engine]:
    """An engine of two worker processes, each of which keeps the K and V of half of the heads."""
    engine = Engine(
        tiny_model,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        kv_transfer_config=connector(cpu_memory="64MiB", files=str(files)),
    )
    yield engine
    engine.close()


def test_same_answer_from_every_tier(spans_engine: Engine, two_workers: Engine) -> None:
    free = two_workers.free()
    for seed in range(4):
        case, rng, how, expected = expected_of(spans_engine, seed, 8000)
        plain = spans_engine.one(case.plain())
        for tier in ("cold", "cpu", "file"):
            forget(two_workers, cpu=tier == "file")
            before = probe(two_workers, "counters")
            got = two_workers.one(case.request(**how))
            assert_same(expected, got, f"{tier}, seed {seed}, {how}", ORACLE_TOLERANCE)
            counts = moved(two_workers, before)
            if tier != "cold":
                assert got["cached"] == (len(case.tokens) - 1) // BLOCK * BLOCK
                assert not counts.get("isolated_tokens")
                assert not counts.get("lookup_tokens") or counts.get(f"reused_tokens/{tier}")
            forget(two_workers, cpu=tier == "file")
            got = two_workers.one(case.plain())
            assert_same(plain, got, f"plain, {tier}, seed {seed}", ORACLE_TOLERANCE)
        forget(two_workers)
        run = two_workers.run(
            [case.request(**how), reordered(case, rng).request(**how), case.plain(at=1)],
            [{"at": 2, "do": "abort", "ids": ["r1"]}],
        )
        assert_same(expected, run["results"]["r0"], f"beside others, seed {seed}", ORACLE_TOLERANCE)
        assert_nothing_left(two_workers)
        assert two_workers.free() == free
    assert not [
        name for name, n in probe(two_workers, "counters").items() if "failures" in name and n
    ]


def test_files_of_another_number_of_workers_are_not_found(
    spans_engine: Engine, tiny_model: str, two_workers: Engine, files: Path
) -> None:
    """A block's file holds what each worker has, one after the other."""
    case, _, how, expected = expected_of(spans_engine, 0, 8100)
    two_workers.one(case.request(**how))
    probe(two_workers, "settle")
    one = Engine(tiny_model, kv_transfer_config=connector(cpu_memory="64MiB", files=str(files)))
    try:
        got = one.one(case.request(**how))
        assert_same(expected, got, "one worker")
        counts = probe(one, "counters")
        assert not counts["vllm_spans_reused_tokens_total/file"]
        assert not [name for name, n in counts.items() if "failures" in name and n]
    finally:
        one.close()
