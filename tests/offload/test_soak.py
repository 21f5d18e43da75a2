"""Prevents: memory, descriptors, blocks or files that grow with the number of requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.cases import BLOCK, Case, tokens
from tests.engine.harness import Engine, assert_same
from tests.offload.engines import assert_nothing_left, block_files, probe

LIMIT = 12 * 1024**2


@pytest.mark.slow
def test_10000_requests_over_more_documents_than_any_tier_holds(
    spans_engine: Engine, cramped_engine: Engine, files_folder: Path
) -> None:
    """Popular and rare documents in any order, some requests aborted, some without spans; 50 answers are checked."""
    engine, folder = cramped_engine, files_folder.parent / "cramped"
    rng = random.Random(1)
    pool = [tokens(rng, BLOCK * rng.randint(1, 3)) for _ in range(300)]
    weights = [1 / (rank + 1) for rank in range(len(pool))]
    free = engine.free()
    first: dict[str, int] = {}
    for batch in range(100):
        requests, events = [], []
        for number in range(100):
            case = Case()
            for text in rng.choices(pool, weights, k=rng.randint(1, 4)):
                case.span(text)
            case.cross(tokens(rng, rng.randint(1, 20)))
            at = rng.randrange(100)
            extra = {"id": f"{batch}-{number}", "at": at, "max_tokens": rng.randint(1, 2)}
            plain = rng.random() < 0.1
            requests.append(case.plain(**extra) if plain else case.request("none", **extra))
            if number and rng.random() < 0.1:
                at += rng.randrange(6)
                events.append({"at": at, "do": "abort", "ids": [extra["id"]]})
        run = engine.run(requests, events, max_steps=20_000)
        assert_nothing_left(engine)
        assert engine.free() == free
        size = sum(path.stat().st_size for path in block_files(folder))
        assert size <= LIMIT * 17 / 16
        now = {"fds": probe(engine, "descriptors"), "rss": probe(engine, "resident_bytes")}
        if batch == 20:
            first = now
        if first:
            assert now["fds"] <= first["fds"] + 4
            assert now["rss"] <= first["rss"] + 64 * 1024**2
        if batch % 2 == 0:
            name = requests[0]["id"]
            expected = spans_engine.one({**requests[0], "at": 0})
            assert_same(expected, run["results"][name], f"request {name}")
    counts = probe(engine, "counters")
    for tier in ("gpu", "cpu", "file"):
        assert counts[f"vllm_spans_reused_tokens_total/{tier}"] > 0, tier
    failed = {name: value for name, value in counts.items() if "load_failures" in name and value}
    # A file may be pruned between the look and the read.
    assert set(failed) <= {"vllm_spans_load_failures_total/vanished"}
