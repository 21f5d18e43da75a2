"""Prevents: spans that work on random weights and not on the model that everybody gets by default."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case
from tests.engine.harness import (
    ORACLE_TOLERANCE,
    assert_same,
    difference,
    oracle_difference,
)


@pytest.fixture(scope="module")
def real_case(smollm2_path: str) -> Case:
    """Three documents of real text in whole blocks, and a question."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)

    def blocks(text: str, count: int) -> list[int]:
        ids: list[int] = tokenizer(text * 4, add_special_tokens=False).input_ids
        assert len(ids) >= count * BLOCK
        return ids[: count * BLOCK]

    texts = [
        inspect.getsource(f)
        for f in (textwrap.TextWrapper, inspect.getsourcelines, inspect.getmodule)
    ]
    case = Case().prefix(blocks("You answer questions about the documents. " * 20, 1))
    for text, count in zip(texts, (4, 5, 2), strict=True):
        case.span(blocks(text, count))
    question = tokenizer("\nWhat does the first document do?\n", add_special_tokens=False)
    return case.cross(question.input_ids)


def test_smollm2_against_the_oracle(engines: Any, smollm2_path: str, real_case: Case) -> None:
    from tests.reference.oracle import Oracle

    engine = engines.get(smollm2_path, max_model_len=1024)
    oracle = Oracle(smollm2_path)
    answers = {}
    for policy in ("none", "legolink", "full"):
        engine.reset()
        answers[policy] = engine.one(real_case.request(policy, max_tokens=8))
        rows = oracle.score(
            real_case.tokens,
            answers[policy]["outputs"][0]["tokens"],
            policy=policy,
            **real_case.layout,
        )
        worst = oracle_difference(answers[policy], rows)
        assert worst <= ORACLE_TOLERANCE, f"{policy}: {worst:.2e}"
    assert difference(answers["none"], answers["full"]) > 10 * ORACLE_TOLERANCE
    engine.reset()
    engine.one(real_case.request("legolink", salt="other"))
    warm_up = Case().prefix(real_case.tokens[:BLOCK] * 2)
    for body in real_case.bodies[::-1]:
        warm_up.span(list(body))
    engine.one(warm_up.cross(real_case.tokens[-9:]).request("legolink"))
    warm = engine.one(real_case.request("legolink", max_tokens=8))
    # The block of the prefix, and the bodies past their gaps.
    assert warm["cached"] == (1 + 3 + 4 + 1) * BLOCK
    assert_same(answers["legolink"], warm, "warm")
