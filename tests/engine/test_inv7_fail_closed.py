"""Prevents: a flag, a setting or a layout that cannot be honoured being ignored."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.cases import BLOCK, documents, random_case, tokens
from tests.engine.harness import Engine, EngineError, assert_same

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"env": {"VLLM_V1_SPANS_GAP_POLICY": "legolinc"}}, "legolinc"),
    "unknown variable": ({"env": {"VLLM_V1_SPANS_GAP_LENGHT": "32"}}, "GAP_LENGHT"),
    "gap length off the block size": ({"env": {"VLLM_V1_SPANS_GAP_LENGTH": "33"}}, "33"),
    "unknown key": ({"additional_config": {"spans": {"gap_polocy": "none"}}}, "gap_polocy"),
    "speculative decoding": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
        "speculative",
    ),
    "prefix caching off": ({"enable_prefix_caching": False}, "prefix"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_start_is_refused_by_name(tiny_model: str, what: str) -> None:
    options, name = REFUSED[what]
    with pytest.raises(EngineError) as refusal:
        Engine(tiny_model, **options).close()
    first_line = str(refusal.value).splitlines()[0:6]
    assert name in "\n".join(first_line), str(refusal.value)[:800]


BAD_LAYOUTS: dict[str, dict[str, Any]] = {
    "off the block grid": {"span_starts": [5]},
    "not increasing": {"span_starts": [2 * BLOCK, BLOCK]},
    "twice the same": {"span_starts": [BLOCK, BLOCK]},
    "outside the prompt": {"span_starts": [BLOCK * 40]},
    "negative": {"span_starts": [-BLOCK]},
    "no list": {"span_starts": "32"},
    "no integers": {"span_starts": [32.0]},
    "both kinds": {"span_starts": [BLOCK], "cross_span_starts": [BLOCK]},
    "cross off the block grid": {"span_starts": [BLOCK], "cross_span_starts": [2 * BLOCK + 1]},
    "cross without a span": {"cross_span_starts": [BLOCK]},
    "unknown policy": {"span_starts": [BLOCK], "span_gap_policy": "legolinc"},
    "gap length off the block size": {"span_starts": [BLOCK], "span_gap_length": 33},
    "negative gap length": {"span_starts": [BLOCK], "span_gap_length": -32},
}


def test_bad_layouts_are_refused_and_the_engine_lives(spans_engine: Engine) -> None:
    """Each is refused on submission, not inside the engine core, and a good request goes on."""
    rng = random.Random(91)
    case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
    expected = spans_engine.one(case.request())
    text = tokens(rng, 6 * BLOCK + 9)
    requests = [{"id": name, "tokens": text, **layout} for name, layout in BAD_LAYOUTS.items()]
    results = spans_engine.run([*requests, case.request(id="good")])["results"]
    for name in BAD_LAYOUTS:
        assert "error" in results[name], f"{name} was accepted: {results[name]}"
    assert_same(expected, results["good"], "beside bad layouts")


def test_prompt_logprobs_with_spans_are_refused(spans_engine: Engine) -> None:
    rng = random.Random(92)
    case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
    result = spans_engine.one(case.request(params={"prompt_logprobs": 1}))
    assert "prompt_logprobs" in result.get("error", ""), result
