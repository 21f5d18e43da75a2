"""Prevents: an answer that depends on the tier its KV comes from, on who wrote it, or on what is missing there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import Engine, assert_same
from tests.engine.states import STATES, cold, reordered
from tests.engine.test_inv1_cache_states import POLICIES, SEEDS, case_of, compare_alone
from tests.offload.engines import (
    assert_nothing_left,
    block_files,
    connector,
    forget,
    moved,
    probe,
)


def expected_of(engine: Engine, seed: int, offset: int = 0) -> tuple[Case, random.Random, Any, Any]:
    """A case, and its answer from an engine without tiers."""
    case, rng = case_of(offset + seed)
    how = POLICIES[seed % len(POLICIES)]
    return case, rng, how, cold(engine, case, rng, how)


TIERS = ["cold", "gpu", "cpu", "file"]


@pytest.mark.parametrize("tier", TIERS)
def test_same_answer_from_every_tier(spans_engine: Engine, tiers_engine: Engine, tier: str) -> None:
    for seed in SEEDS:
        case, rng, how, expected = expected_of(spans_engine, seed, 3000 + 100 * TIERS.index(tier))
        if tier != "cold":
            tiers_engine.one(reordered(case, rng).request(**how))
            tiers_engine.one(case.request(**how))
        if tier in ("cpu", "file"):
            forget(tiers_engine, cpu=tier == "file")
        before = probe(tiers_engine, "counters")
        got = tiers_engine.one(case.request(**how))
        assert_same(expected, got, f"{tier}, seed {seed}, {how}, {case.layout}")
        counts = moved(tiers_engine, before)
        reused = {
            name.split("/")[1]: count
            for name, count in counts.items()
            if name.startswith("reused_tokens/")
        }
        assert counts.get("lookup_tokens", 0) == sum(reused.values()) + counts.get(
            "isolated_tokens", 0
        )
        if tier != "cold":
            # The last block is never reused, and a document that comes twice is loaded once.
            assert got["cached"] == (len(case.tokens) - 1) // BLOCK * BLOCK
            assert set(reused) <= {"gpu", tier}
            assert not counts.get("lookup_tokens") or reused.get(tier)
            assert not counts.get("isolated_tokens")
    assert_nothing_left(tiers_engine)


@pytest.mark.parametrize("state", [s for s in STATES if s != "cold"])
def test_same_answer_in_every_state_over_warm_tiers(
    spans_engine: Engine, tiers_engine: Engine, state: str
) -> None:
    """Each state empties the KV cache only: what comes after is loaded, in the middle of all it does."""
    for seed in SEEDS:
        case, rng, how, expected = expected_of(spans_engine, seed)
        tiers_engine.one(reordered(case, rng, keep=0.6).request(**how))
        if seed % 2:
            probe(tiers_engine, "evict_rows", share=0.3, seed=seed)
        got = STATES[state](tiers_engine, case, rng, how)
        assert_same(expected, got, f"{state}, seed {seed}, {how}, {case.layout}")
    assert_nothing_left(tiers_engine)


@pytest.mark.parametrize("seed", range(3))
def test_everything_too_small(spans_engine: Engine, cramped_engine: Engine, seed: int) -> None:
    """Eviction in every tier at once, and a CPU tier that holds less than one request."""
    rng = random.Random(1000 + seed)
    pool = documents(rng, 6, (1, 5))
    requests = [
        random_case(rng, pool, max_spans=4, max_blocks=20).request(
            **POLICIES[seed % 3], max_tokens=rng.randint(3, 60), at=rng.randrange(20)
        )
        for _ in range(8)
    ]
    for _ in range(3):
        compare_alone(spans_engine, requests, cramped_engine.run(requests))
        assert_nothing_left(cramped_engine)


def test_a_hole_costs_only_itself(
    spans_engine: Engine, tiers_engine: Engine, files_folder: Path
) -> None:
    """One span of three lost in all tiers, then one block of another."""
    rng = random.Random(11)
    texts = [tokens(rng, 6 * BLOCK) for _ in range(3)]
    case = Case().prefix(tokens(rng, BLOCK))
    for text in texts:
        case.span(text)
    case.cross(tokens(rng, 20))
    expected = spans_engine.one(case.request())
    for text in texts:
        tiers_engine.one(Case().span(text).cross(tokens(rng, 9)).request("none"))
    forget(tiers_engine, cpu=True)
    present = block_files(files_folder)
    probe_case = Case().span(texts[1]).cross(tokens(rng, 9)).request("none")
    held = probe(tiers_engine, "gaps", request=probe_case)["held"]
    assert held == [True] * 6
    keys = probe(tiers_engine, "keys_of", request=probe_case)
    lost = [path for path in present if path.stem[:64] in keys[2:3]]
    assert len(lost) == 1
    for path in lost:
        path.unlink()
    forget(tiers_engine, cpu=True)
    answer = probe(tiers_engine, "gaps", request=probe_case)
    assert answer["gaps"] == [[2 * BLOCK, 3 * BLOCK], [6 * BLOCK, 6 * BLOCK + 9]]
    assert answer["later"] == answer["gaps"]
    forget(tiers_engine, cpu=True)
    before = probe(tiers_engine, "counters")
    got = tiers_engine.one(case.request())
    assert_same(expected, got, "a hole in a span")
    counts = moved(tiers_engine, before)
    assert counts["isolated_tokens"] == BLOCK
    assert counts["reused_tokens/file"] == (3 * 5 - 1) * BLOCK
    assert "reused_tokens/gpu" not in counts


def test_gaps_are_what_is_not_held(tiers_engine: Engine) -> None:
    """Strictly increasing, half-open, not adjacent; together with what is held they are the whole prompt."""
    rng = random.Random(12)
    for seed in range(8):
        case = random_case(rng, documents(rng, 4, (2, 5)), max_spans=4, max_blocks=24)
        tiers_engine.one(case.request())
        forget(tiers_engine, cpu=True)
        tiers_engine.one(reordered(case, rng, keep=0.7).request())
        forget(tiers_engine)
        probe(tiers_engine, "evict_rows", share=0.4, seed=seed)
        answer = probe(tiers_engine, "gaps", request=case.request())
        for start in (0, BLOCK):
            gaps = answer["gaps" if not start else "later"]
            flat = [edge for gap in gaps for edge in gap]
            assert flat == sorted(set(flat)), "neither empty, nor adjacent, nor out of order"
            assert flat[-1] == answer["tokens"]
            inside = {token for first, last in gaps for token in range(first, last)}
            for block, held in enumerate(answer["held"]):
                if block * BLOCK >= start:
                    expected = set() if held else set(range(block * BLOCK, block * BLOCK + BLOCK))
                    block_tokens = set(range(block * BLOCK, block * BLOCK + BLOCK))
                    assert inside & block_tokens == expected


def test_after_a_restart_and_by_another_replica(
    spans_engine: Engine, tiny_model: str, tmp_path: Path
) -> None:
    """Two engines on one folder write and read in both orders at once; then a third one, after both are killed."""
    cases = [expected_of(spans_engine, seed, 200) for seed in range(6)]
    config = connector(cpu_memory="32MiB", files=str(tmp_path))
    replicas = [Engine(tiny_model, kv_transfer_config=config) for _ in range(2)]
    try:
        for order in (1, -1):
            pairs = list(zip(replicas, (cases[::order], cases[::-order]), strict=True))
            for step in range(len(cases)):
                for engine, mine in pairs:
                    case, _, how, expected = mine[step]
                    got = engine.one(case.request(**how))
                    assert_same(expected, got, f"order {order}, step {step}")
            for engine in replicas:
                forget(engine, cpu=True)
        counts = [probe(engine, "counters") for engine in replicas]
        for count in counts:
            assert count["vllm_spans_reused_tokens_total/file"] > 0
            assert not [name for name, value in count.items() if "failures" in name and value]
            assert (
                count["vllm_spans_lookup_tokens_total"]
                == sum(count[f"vllm_spans_reused_tokens_total/{t}"] for t in ("gpu", "cpu", "file"))
                + count["vllm_spans_isolated_tokens_total"]
            )
    finally:
        for engine in replicas:
            engine.close()
    third = Engine(tiny_model, kv_transfer_config=config)
    try:
        for case, _, how, expected in cases:
            got = third.one(case.request(**how))
            assert_same(expected, got, "after a restart")
            assert got["cached"] == (len(case.tokens) - 1) // BLOCK * BLOCK
        assert probe(third, "counters")["vllm_spans_isolated_tokens_total"] == 0
    finally:
        third.close()


def test_another_model_at_the_same_place_does_not_see_the_files(
    spans_engine: Engine, tiny_model: str, tmp_path: Path
) -> None:
    """The weights are replaced under the same path: what the old ones computed is not there for the new ones."""
    import shutil

    import safetensors.torch

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = connector(cpu_memory="32MiB", files=str(tmp_path / "files"))
    case, _ = case_of(400)
    request = case.request()
    first = Engine(str(model), kv_transfer_config=config)
    try:
        old = first.one(request)
        probe(first, "settle")
    finally:
        first.close()
    weights = safetensors.torch.load_file(model / "model.safetensors")
    name = next(n for n in sorted(weights) if n.endswith("layers.1.self_attn.v_proj.weight"))
    weights[name] = weights[name] * 1.5
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})
    fresh = Engine(str(model))
    try:
        expected = fresh.one(request)
    finally:
        fresh.close()
    second = Engine(str(model), kv_transfer_config=config)
    try:
        got = second.one(request)
        assert got["cached"] == expected["cached"]
        assert_same(expected, got, "new weights")
    finally:
        second.close()
    with pytest.raises(AssertionError):
        assert_same(old, expected, "the change of weights has no effect: this test cannot fail")
