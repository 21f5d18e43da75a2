"""Prevents: an oracle that agrees with a wrong engine because it is wrong itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference.models import INTERLEAVED, WINDOW, save_model
from tests.reference.oracle import Oracle, plus_spans, segments

BLOCK = 32


FORMS = [
    "llama3_rope",
    "yarn_rope",
    "qwen3",
    "stablelm",
    "glm4",
    "cohere2",
    "granite_nope",
    "gemma3",
    "gpt_oss",
]
WINDOWS = {
    "mistral_window": WINDOW,
    "qwen2_window": WINDOW,
    "phi3": WINDOW,
    "gemma2": WINDOW,
    "gemma3": WINDOW,
    "gpt_oss": WINDOW,
    # As vLLM reads its configuration.
    "cohere2": WINDOW + 1,
    "llama": 10_000,
}


@pytest.fixture(scope="module", params=FORMS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder: Path = save_model(request.param, tmp_path_factory.mktemp(request.param))
    return Oracle(str(folder), BLOCK, interleaved=request.param in INTERLEAVED)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(count)]


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


def test_full_policy_is_a_plain_forward(oracle: Oracle) -> None:
    prompt = tokens(5 * BLOCK + 7)
    plain, _ = oracle.forward(prompt)
    ours, _ = oracle.prefill(prompt, span_starts=[BLOCK, 3 * BLOCK], policy="full")
    assert gap(ours[-1], plain[-1]) < 1e-5


def test_single_span_at_the_start_is_a_plain_forward(oracle: Oracle) -> None:
    prompt = tokens(4 * BLOCK + 5, 1)
    plain, _ = oracle.forward(prompt)
    for policy in ("none", "legolink"):
        ours, _ = oracle.prefill(prompt, span_starts=[0], policy=policy)
        assert gap(ours[-1], plain[-1]) < 1e-4


def test_moved_keys_equal_keys_computed_there(oracle: Oracle) -> None:
    span = tokens(3 * BLOCK, 2)
    for offset in (0, BLOCK, 11 * BLOCK):
        moved = oracle.move(oracle.alone(span), 0, offset)
        _, there = oracle.forward(span, first_position=offset)
        for (key, value), (other_key, other_value) in zip(moved, there, strict=True):
            assert gap(key, other_key) < 2e-3 * float(key.abs().max())
            assert gap(value, other_value) < 2e-3 * float(value.abs().max())


def test_legolink_is_between_none_and_full(oracle: Oracle) -> None:
    """The three policies differ by far more than any tolerance, so a mix-up cannot pass."""
    prompt = tokens(6 * BLOCK + 9, 3)
    layout: dict[str, Any] = {"span_starts": [BLOCK, 3 * BLOCK], "cross_span_starts": [6 * BLOCK]}
    last = {
        policy: oracle.prefill(prompt, policy=policy, **layout)[0][-1]
        for policy in ("none", "legolink", "full")
    }
    assert gap(last["none"], last["full"]) > 0.01
    assert gap(last["none"], last["legolink"]) > 0.01
    assert gap(last["legolink"], last["full"]) > 0.01


def test_gap_as_long_as_every_span_is_full(oracle: Oracle) -> None:
    prompt = tokens(6 * BLOCK + 9, 4)
    layout: dict[str, Any] = {"span_starts": [BLOCK, 3 * BLOCK], "cross_span_starts": [5 * BLOCK]}
    whole, _ = oracle.prefill(prompt, policy="legolink", gap_length=8 * BLOCK, **layout)
    full, _ = oracle.prefill(prompt, policy="full", **layout)
    assert gap(whole[-1], full[-1]) < 1e-4


def test_score_agrees_with_greedy(oracle: Oracle) -> None:
    prompt = tokens(5 * BLOCK + 3, 5)
    layout: dict[str, Any] = {"span_starts": [BLOCK, 2 * BLOCK], "cross_span_starts": [4 * BLOCK]}
    answer, chosen = oracle.greedy(prompt, 5, **layout)
    scored = oracle.score(prompt, answer, **layout)
    for row, token, logprob in zip(scored, answer, chosen, strict=True):
        assert abs(float(row[token]) - logprob) < 1e-4


def test_wrong_rotation_is_seen(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one block, not at all, and at the wrong end of the pair: each must move the logits."""
    prompt = tokens(8 * BLOCK + 9, 6)
    layout: dict[str, Any] = {"span_starts": [BLOCK, 4 * BLOCK], "policy": "none"}
    right = oracle.prefill(prompt, **layout)[0][-1]
    move = oracle.move
    monkeypatch.setattr(oracle, "move", lambda kv, source, target: move(kv, source, target + BLOCK))
    assert gap(oracle.prefill(prompt, **layout)[0][-1], right) > 1e-2
    monkeypatch.setattr(oracle, "move", lambda kv, source, target: kv)
    assert gap(oracle.prefill(prompt, **layout)[0][-1], right) > 1e-2
    monkeypatch.setattr(oracle, "move", move)
    monkeypatch.setattr(oracle, "interleaved", not oracle.interleaved)
    assert gap(oracle.prefill(prompt, **layout)[0][-1], right) > 1e-2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order: which experts other tokens go to changes how many threads share a sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", WINDOWS)
def test_window_counts_positions_of_what_is_computed(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    """Which tokens the first layer lets each token see: in context by place in the prompt, alone within the span."""
    oracle = Oracle(str(save_model(name, tmp_path)), BLOCK, interleaved=name in INTERLEAVED)
    prompt = tokens(9 * BLOCK + 20, 9)
    spans = [(2 * BLOCK, 5 * BLOCK), (5 * BLOCK, 9 * BLOCK)]
    layout = {"span_starts": [s for s, _ in spans], "cross_span_starts": [9 * BLOCK]}
    # The second layer's V depends on what a token saw in the first.
    before = oracle.prefill(prompt, gap_length=BLOCK, **layout)[1][1][1][0]
    for changed in (0, 23, 60, 64, 100, 130, 159, 160, 200, 240, 287, 300):
        other = list(prompt)
        other[changed] += 1
        after = oracle.prefill(other, gap_length=BLOCK, **layout)[1][1][1][0]
        saw = (after - before).abs().amax(dim=(0, 2)) > 1e-6
        for place in range(len(prompt)):
            start, end = next(
                ((s, e) for s, e in spans if s + BLOCK <= place < e), (0, len(prompt))
            )
            sees = start <= changed < end and 0 <= place - changed < WINDOWS[name]
            assert bool(saw[place]) == sees, f"token {place} and token {changed}"


def test_rotary_layers_are_found(tmp_path: Path) -> None:
    assert Oracle(str(save_model("smollm3", tmp_path / "s"))).rotary_layers() == [True, False] * 2
    assert (
        Oracle(str(save_model("granite_nope", tmp_path / "g"))).rotary_layers()
        == [
            True,
            False,
        ]
        * 2
    )
    assert Oracle(str(save_model("llama", tmp_path / "l"))).rotary_layers() == [True] * 4


def test_segments_cover_the_prompt_once() -> None:
    rng = random.Random(7)
    for _ in range(300):
        blocks = rng.randrange(1, 20)
        count = blocks * BLOCK + rng.randrange(1, BLOCK + 1)
        marks = sorted(rng.sample(range(blocks + 1), rng.randrange(1, min(8, blocks + 1) + 1)))
        cross = {m for m in marks[1:] if rng.random() < 0.3}
        spans = [m * BLOCK for m in marks if m not in cross]
        plan = segments(
            count,
            spans,
            sorted(m * BLOCK for m in cross),
            rng.choice(["none", "legolink", "full"]),
            BLOCK * rng.randrange(1, 4),
            BLOCK,
        )
        position = 0
        for segment in plan:
            assert segment.start == position < segment.end
            position = segment.end
        assert position == count
        assert plan[-1].kind == "context"


def test_last_token_is_never_in_a_span() -> None:
    assert plus_spans(64, [0, 32], [], 32) == [(0, 32)]
    assert plus_spans(65, [0, 32], [], 32) == [(0, 32), (32, 64)]
    assert plus_spans(96, [32], [], 32) == [(32, 64)]
