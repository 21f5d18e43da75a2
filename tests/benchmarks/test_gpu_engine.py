"""Prevents: a GPU benchmark that does not run where it is needed, or whose correctness part cannot fail."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_engine
from benchmarks.correctness_cases import Cases, random_cases
from benchmarks.correctness_check import FLOORS, Check
from benchmarks.engine_options import VARIANTS
from benchmarks.engine_process import SPANS, STOCK, EngineProcess, running
from benchmarks.forced_steps import decoded, forced
from benchmarks.gpu_correctness import Plan, compare, engine_options
from benchmarks.tiny_models import save_model

STEPS = 3
CASES = random_cases(2, 32, most=5)


def test_runs_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ["--tiny", "--only", "ttft", "correctness", "--prompts", "2", "--steps", "2"]
    variants = ["--variant", "default", "tiers"]
    status = gpu_engine.main([*command, *variants, "--out", str(out), "--logs", str(tmp_path)])
    result = json.loads(out.read_text("utf-8"))
    assert "failed" not in result
    assert status == 0

    assert [row["work"] for row in result["rows"]] == [
        "TTFT 4 x 128, warm in a new order",
        "TTFT 4 x 128, first use (all cold)",
        "TTFT 4 x 128, no spans",
    ]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["stock"] / row["spans"], rel=1e-2)
        low, high = row["spread"]["stock cold"]
        assert 0 < low <= row["stock"] <= high
    meta = result["meta"]
    assert {"torch", "python"} <= meta["versions"].keys()
    assert {name: engine["spans"] for name, engine in meta["engines"].items()} == {
        "stock": False,
        "spans": True,
    }
    assert "model" not in meta["arguments"]
    assert str(tmp_path) not in meta["command"]

    compared: dict[str, Any] = {}
    for entry in result["correctness"].values():
        assert entry["ok"], entry["failures"]
        compared |= entry["comparisons"]
    for name in (
        "policy full / stock",
        "spans warm / cold",
        "a tiny cache, again / cold",
        "from cpu memory / cold",
        "from files / cold",
    ):
        assert compared[name]["steps"] == 2 * 2
        assert compared[name]["same"] == 1.0
    assert compared["legolink and none / stock (must differ)"]["mean"] > 1e-3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, ...]]:
    """Both engines of the correctness part on a model of two layers."""
    folder = tmp_path_factory.mktemp("correctness")
    model = save_model("llama", folder, "float32", small=True)
    plan = Plan(folder, cpu=True, prompts=2, steps=STEPS)
    options = engine_options(plan, VARIANTS["default"], model, CASES.longest + 64)
    engines = [plan.engine(name, options) for name in (STOCK, SPANS)]
    with running(*engines, at_once=True):
        yield tuple(engines)


def failures(pair: tuple[EngineProcess, ...], fault: str | None, cases: Cases = CASES) -> list[str]:
    """Comparisons that fail with a fault in the engine with spans."""
    stock, spans = pair
    check = Check(FLOORS["float32"])
    for engine in pair:
        engine.ask("reset")
    if fault is None:
        compare(check, stock, spans, cases, STEPS)
    else:
        spans.ask("call", target="tests.benchmarks.faults:apply", name=fault)
        try:
            compare(check, stock, spans, cases, STEPS)
        finally:
            spans.ask("call", target="tests.benchmarks.faults:restore")
    result: dict[str, Any] = check.result()
    assert result["ok"] is not bool(result["failures"])
    return list(result["failures"])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("rotation off by a block", {"no spans / stock", "policy full / stock"}),
        ("cold spans in context", {"spans warm / cold"}),
        ("gaps in shared blocks", {"one span at two positions at once / cold"}),
        ("no isolated rows", {"spans warm / cold"}),
        ("full is not full", {"policy full / stock"}),
    ],
)
def test_a_broken_engine_fails(
    pair: tuple[EngineProcess, ...], fault: str, expected: set[str]
) -> None:
    found = failures(pair, fault)
    assert expected <= set(found), found
    assert failures(pair, None) == []


def test_the_policy_full_for_all_fails(pair: tuple[EngineProcess, ...]) -> None:
    """Answers that never differ from stock's would make every other comparison pass."""
    full = [
        {**request, "extra_args": {**request["extra_args"], "span_gap_policy": "full"}}
        for request in CASES.spanned
    ]
    found = failures(pair, None, Cases(CASES.plain, full))
    assert "legolink and none / stock (must differ)" in found


def test_decoding_goes_on_where_it_parts_from_the_text(pair: tuple[EngineProcess, ...]) -> None:
    """A text that the model would never write is asked for token by token all the same."""
    stock, _ = pair
    rng = random.Random(5)
    texts = [[rng.randrange(100, 2000) for _ in range(4)] for _ in CASES.plain]
    ours = decoded(stock, CASES.plain, texts, together=None)
    theirs = forced(stock, CASES.plain, texts)
    assert [[step.token for step in steps] for steps in ours] == [
        [step.token for step in steps] for steps in theirs
    ]
    assert all(len(steps) == 4 for steps in ours)


@pytest.mark.parametrize(
    "command",
    [
        ["--tiny", "--graphs", "piecewise"],
        ["--tiny", "--compile"],
        ["--tiny", "--variant", "fp8"],
        ["--tiny", "--prompts", "3"],
    ],
)
def test_what_cannot_run_is_refused(command: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_engine.parse([*command, "--out", "x.json"])


def test_a_part_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    result: dict[str, Any] = {"meta": {}}

    def fails() -> None:
        result["rows"] = [{"work": "the first of two"}]
        raise RuntimeError("no memory")

    assert not gpu_engine.attempt(result, "ttft", out, fails)
    assert gpu_engine.attempt(result, "decode", out, lambda: None)
    written = json.loads(out.read_text("utf-8"))
    assert written["rows"] == [{"work": "the first of two"}]
    assert "no memory" in written["failed"]["ttft"]
    assert set(written["meta"]["seconds"]) == {"ttft", "decode"}
