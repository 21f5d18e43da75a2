"""Prevents: spans that are right with ``--enforce-eager`` only."""

from __future__ import annotations

import random
import shutil
from typing import Any

import pytest

from tests.engine.cases import documents, random_case
from tests.engine.harness import Engine, assert_same
from tests.engine.states import reordered


@pytest.mark.slow  # Inductor writes C++ and compiles it: 40 s on two idle cores, and a compiler is needed.
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler"
)
def test_a_compiled_model_answers_like_an_eager_one(
    engines: Any, spans_engine: Engine, tiny_model: str
) -> None:
    compiled = engines.get(tiny_model, enforce_eager=False)
    assert compiled.call("tests.engine.probes:compiled_graphs") > 0
    assert spans_engine.call("tests.engine.probes:compiled_graphs") == 0
    for seed, how in enumerate([{}, {"policy": "none"}, {"policy": "full"}]):
        rng = random.Random(1300 + seed)
        case = random_case(rng, documents(rng, 4), max_spans=6, max_blocks=24)
        compiled.reset()
        expected = spans_engine.one(case.request(**how))
        assert_same(expected, compiled.one(case.request(**how)), f"cold, {how}")
        compiled.reset()
        compiled.one(reordered(case, rng).request(**how))
        assert_same(expected, compiled.one(case.request(**how)), f"warm, {how}")
