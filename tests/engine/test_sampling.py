"""Prevents: spans breaking a feature of sampling, or a feature breaking spans."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.engine.cases import Case, documents, random_case
from tests.engine.harness import Engine, assert_same


def a_case(seed: int) -> Case:
    rng = random.Random(seed)
    return random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)


VARIANTS: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1.0, "seed": 7},
    "top_p_top_k": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"17": 40.0}},
    "min_tokens": {"min_tokens": 4, "ignore_eos": False},
    "bad_words": {"bad_words": ["the"], "detokenize": True},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_sampling_is_the_same_cold_and_warm(spans_engine: Engine, variant: str) -> None:
    case = a_case(80)
    request = case.request(params=VARIANTS[variant], max_tokens=8)
    cold = spans_engine.one(request)
    warm = spans_engine.one(request)
    assert warm["cached"] > 0
    assert cold["outputs"][0]["tokens"] == warm["outputs"][0]["tokens"]
    assert_same(cold, warm, variant)
    if variant == "logit_bias":
        assert set(cold["outputs"][0]["tokens"]) == {17}


def test_n_answers(spans_engine: Engine) -> None:
    """Two answers of one request share its spans and its prompt, and each is right."""
    case = a_case(81)
    single = spans_engine.one(case.request(max_tokens=1))["outputs"][0]
    spans_engine.reset()
    free = spans_engine.free()
    params = {"n": 3, "temperature": 1.0, "seed": 5}
    first = spans_engine.one(case.request(params=params))
    assert len(first["outputs"]) == 3
    for output in first["outputs"]:
        for token, logprob in output["logprobs"][0].items():
            expected = single["logprobs"][0].get(token, logprob)
            assert abs(logprob - expected) <= 1e-4, f"token {token}"
    spans_engine.reset()
    second = spans_engine.one(case.request(params=params))
    assert [o["tokens"] for o in first["outputs"]] == [o["tokens"] for o in second["outputs"]]
    assert len({tuple(o["tokens"]) for o in first["outputs"]}) > 1
    assert spans_engine.free() == free


def test_structured_output(spans_engine: Engine, stock_engine: Engine) -> None:
    """A grammar is followed with spans, cold and warm, and under `full` as stock follows it."""
    case = a_case(82)
    params = {
        "structured": {"regex": r'\{"ok": (true|false), "n": [1-9][0-9]{1,8}\}'},
        "detokenize": True,
        "ignore_eos": False,
    }
    request = case.request(params=params, max_tokens=60)
    cold = spans_engine.one(request)
    warm = spans_engine.one(request)
    assert set(json.loads(cold["outputs"][0]["text"])) == {"ok", "n"}
    assert cold["outputs"][0]["text"] == warm["outputs"][0]["text"]
    assert_same(cold, warm, "structured output")
    full = spans_engine.one(case.request("full", params=params, max_tokens=60))
    assert_same(stock_engine.one(case.plain(params=params, max_tokens=60)), full, "full")
    regex = {**params, "structured": {"regex": "[ab]{5}c"}}
    for index, result in enumerate(
        spans_engine.many(
            [
                case.request(params=regex, max_tokens=30),
                a_case(83).request(params=regex, max_tokens=30),
            ]
        )
    ):
        text = result["outputs"][0]["text"]
        assert len(text) == 6 and set(text[:5]) <= {"a", "b"} and text[5] == "c", (index, text)


def test_stop_strings(spans_engine: Engine) -> None:
    case = a_case(84)
    whole = spans_engine.one(case.request(params={"detokenize": True}, max_tokens=12))
    text = whole["outputs"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = spans_engine.one(case.request(params={"detokenize": True, "stop": [stop]}, max_tokens=12))
    assert cut["outputs"][0]["text"] == text[: text.index(stop)]
    assert cut["outputs"][0]["finish"] == "stop"


def test_stop_token(spans_engine: Engine) -> None:
    case = a_case(85)
    answer = spans_engine.one(case.request(max_tokens=8))["outputs"][0]["tokens"]
    stop = answer[4]
    cut = spans_engine.one(case.request(params={"stop_token_ids": [stop]}, max_tokens=8))
    assert cut["outputs"][0]["tokens"] == answer[: answer.index(stop) + 1]


def test_one_token_and_many(spans_engine: Engine) -> None:
    """The shortest answer, and one that crosses several block borders while it is decoded."""
    case = a_case(86)
    long = spans_engine.one(case.request(max_tokens=100))
    spans_engine.reset()
    assert_same(long, spans_engine.one(case.request(max_tokens=100)), "100 tokens")
    short = spans_engine.one(case.request(max_tokens=1))
    assert short["outputs"][0]["tokens"] == long["outputs"][0]["tokens"][:1]
