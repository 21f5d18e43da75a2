"""Prevents: an engine that is consistent with itself and wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case, tokens
from tests.engine.harness import (
    ORACLE_TOLERANCE,
    Engine,
    difference,
    oracle_difference,
)
from tests.engine.states import reordered

POLICIES: list[dict[str, Any]] = [
    {"policy": "none"},
    {"policy": "legolink", "gap_length": 32},
    {"policy": "legolink", "gap_length": 64},
]


def check(
    engine: Engine, oracle: Any, seed: int, how: dict[str, Any], max_blocks: int = 30
) -> None:
    """Cold and warm answers of one random layout against the oracle."""
    rng = random.Random(seed)
    case = random_case(rng, documents(rng, 4), max_spans=6, max_blocks=max_blocks)
    layout = {**how, **case.layout}
    engine.reset()
    answers = [engine.one(case.request(**how))]
    engine.reset()
    engine.one(reordered(case, rng).request(**how))
    answers.append(engine.one(case.request(**how)))
    for name, answer in zip(("cold", "warm"), answers, strict=True):
        rows = oracle.score(case.tokens, answer["outputs"][0]["tokens"], **layout)
        worst = oracle_difference(answer, rows)
        assert worst <= ORACLE_TOLERANCE, f"{name}, seed {seed}, {layout}: {worst:.2e}"


@pytest.mark.parametrize("how", POLICIES, ids=["none", "legolink32", "legolink64"])
def test_llama_against_the_oracle(
    spans_engine: Engine, oracle_for: Callable[[str], Any], how: dict[str, Any]
) -> None:
    for seed in range(6):
        check(spans_engine, oracle_for("llama"), 200 + seed, how)


FORMS = [
    "llama3_rope",
    "yarn_rope",
    "qwen3",
    "stablelm",
    "phi3",
    "granite_nope",
    "mixtral",
    "mistral_window",
    "qwen2_window",
    "gemma2",
    "gemma3",
    "cohere2",
    "gpt_oss",
]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_against_the_oracle(
    engines: Any, model_path: Callable[[str], str], oracle_for: Callable[[str], Any], name: str
) -> None:
    """Scaled, magnitude-scaled, partial and no rotation, normalised keys, experts, windows, caps and sinks."""
    engine = engines.get(model_path(name), max_model_len=2048)
    for seed, how in enumerate([*POLICIES, {"policy": "full"}]):
        check(engine, oracle_for(name), 303 + seed, how)


def test_policies_give_different_answers(spans_engine: Engine) -> None:
    """A policy that is ignored would pass every other test."""
    rng = random.Random(17)
    case = Case().prefix(tokens(rng, 2 * BLOCK))
    for _ in range(3):
        case.span(tokens(rng, 4 * BLOCK))
    case.cross(tokens(rng, 20))
    answers = [spans_engine.one(case.request(**how)) for how in [*POLICIES, {"policy": "full"}]]
    for index, one in enumerate(answers):
        for two in answers[index + 1 :]:
            assert difference(one, two) > 10 * ORACLE_TOLERANCE
