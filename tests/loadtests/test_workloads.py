"""Prevents workloads that change from run to run or from process to process, and settings that are silently ignored."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests import dry_run, workloads
from loadtests.__main__ import main
from loadtests.arrivals import Closed
from loadtests.fields import WorkloadError
from loadtests.prompts import Session
from loadtests.texts import text
from loadtests.workloads.library import Library
from loadtests.workloads.trace import BLOCK_TOKENS, Record, parse, shared_runs

FILES = sorted((Path(workloads.__file__).parent / "files").glob("*.toml"))
NAMES = [path.stem for path in FILES]

TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1300, "output_length": 900, "hash_ids": [0, 3, 4]},
    {"timestamp": 3000, "input_length": 2000, "output_length": 7, "hash_ids": [0, 3, 5, 6]},
    {"timestamp": 6000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 3, 4]},
]
QUESTIONS = [
    {
        "question": f"Who is {number}?",
        "ctxs": [{"title": "", "text": f"passage {number} {i}"} for i in range(3)],
    }
    for number in range(4)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)) + "\n")
    (folder / "questions.json").write_text(json.dumps(QUESTIONS))
    return {"trace": folder / "trace.jsonl", "questions": folder / "questions.json"}


def load(name: str, data: dict[str, Path]) -> workloads.Plan:
    return workloads.load(FILES[NAMES.index(name)], data.get(kind(name)))


def kind(name: str) -> str:
    """Of a workload file: the first part of its name that is one."""
    return next(kind for kind in (*workloads.KINDS, name) if name.startswith(kind))


def some(plan: workloads.Plan, count: int = 4) -> list[Session]:
    return [plan.workload.session(number) for number in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_sessions_do_not_depend_on_what_was_made_before(name: str, data: dict[str, Path]) -> None:
    plan, again = load(name, data), load(name, data)
    forward = some(plan)
    backward = [again.workload.session(number) for number in reversed(range(4))]
    assert forward == backward[::-1]
    assert len({repr(session.turns) for session in forward}) == 4
    assert [session.number for session in forward] == list(range(4))


def digest(paths: dict[str, Path]) -> str:
    """Of everything that all workload files would send first."""
    found = hashlib.sha256()
    for name in NAMES:
        plan = load(name, paths)
        form = plan.form_for("m", True)
        for sent in dry_run.requests(plan, 4):
            found.update(json.dumps([sent.at, sent.name, form.request(sent.turn)]).encode())
    return found.hexdigest()


def test_another_process_sends_the_same(data: dict[str, Path]) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.loadtests.test_workloads import digest\n"
        "print(digest(dict(zip(['trace', 'questions'], map(Path, sys.argv[1:])))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(data["trace"]), str(data["questions"])],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == digest(data)


@pytest.mark.parametrize("name", NAMES)
def test_the_dry_run_says_what_would_be_sent(
    name: str, data: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["dry-run", str(FILES[NAMES.index(name)]), "--sessions", "4", "--show", "1"]
    assert main(arguments + (["--data", str(data[kind(name)])] if kind(name) in data else [])) == 0
    printed = capsys.readouterr().out
    assert "ideal prefix cache" in printed and "ideal span cache" in printed
    assert '"stream": true' in printed


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "shared_documents",
        "shared_documents": {"count": 5, "length": 4, "per_request": 2},
        "arrivals": {"kind": "constant", "rate": 1, "duration": 3},
        **changes,
    }


SHARED = {"count": 5, "length": 4, "per_request": 2}
WRONG = [
    (settings(kind="shared_document"), "kind", "shared_documents"),
    (settings(sead=1), "sead", "did you mean seed"),
    (settings(form="part"), "form", "parts"),
    (settings(seed=True), "seed", "whole number"),
    (settings(arrivals={"kind": "constant", "rate": 0, "duration": 3}), "arrivals.rate", "above 0"),
    (settings(arrivals={"kind": "poisson", "rate": 1}), "arrivals.duration", "missing"),
    (settings(arrivals={"kind": "recorded"}), "arrivals.kind", "trace"),
    (
        settings(arrivals={"kind": "bursts", "rate": 1, "duration": 1, "size": 0}),
        "arrivals.size",
        "1",
    ),
    (
        settings(shared_documents=SHARED | {"per_request": 6}),
        "shared_documents.per_request",
        "count",
    ),
    (settings(shared_documents=SHARED | {"length": [5, 4]}), "shared_documents.length", "least"),
    (settings(shared_documents=SHARED | {"zip": 1.0}), "shared_documents.zip", "zipf"),
    (settings(shared_documents=SHARED | {"zipf": float("nan")}), "shared_documents.zipf", "number"),
    (settings(shared_documents=SHARED | {"order": "random"}), "shared_documents.order", "shuffled"),
    (settings(shared_documents=3), "shared_documents", "table"),
    (settings(output={"max_token": 3}), "output.max_token", "max_tokens"),
    (settings(output={"max_tokens": 0}), "output.max_tokens", "1 or more"),
    (settings(spans={"gap_size": 3}), "spans.gap_size", "known are"),
    (settings(spans={"vocabulary": [3, 4]}), "spans.vocabulary", "widen"),
    (settings(body={"stream": False}), "body.stream", "take it out"),
    (settings(body=3), "body", "table"),
    ({"kind": "plain", "arrivals": {}}, "[plain]", "missing"),
    (
        {"kind": "trace", "trace": {}, "arrivals": {"kind": "recorded"}},
        "trace.data",
        "--data",
    ),
    (
        {"kind": "trace", "trace": {"data": "no such file"}, "arrivals": {"kind": "recorded"}},
        "no such file",
        "--data",
    ),
]


@pytest.mark.parametrize(("wrong", "key", "remedy"), WRONG, ids=[key for _, key, _ in WRONG])
def test_a_wrong_setting_is_named_with_its_remedy(
    wrong: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(WorkloadError) as error:
        workloads.parse(wrong, "w", Path("."))
    assert key in str(error.value) and remedy in str(error.value)


def test_a_wrong_file_is_an_error_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.toml"
    file.write_text("kind = ")
    assert main(["dry-run", str(file)]) == 2
    assert main(["dry-run", str(tmp_path / "none.toml")]) == 2
    assert main(["dry-run", str(FILES[NAMES.index("plain")]), "--data", str(file)]) == 2
    printed = capsys.readouterr().err
    assert "no TOML" in printed and "cannot be read" in printed and "reads no file" in printed


def test_a_library_can_be_shared_by_files_of_other_seeds() -> None:
    """A cache that one of them has filled is full for the other, and no request is the same."""
    table = SHARED | {"library_seed": 7}
    first, second, alone = (
        workloads.parse(settings(seed=seed, shared_documents=each), "w", Path())
        for seed, each in ((1, table), (2, table), (2, SHARED))
    )

    def said(plan: workloads.Plan) -> tuple[set[str], set[str]]:
        pieces = [
            piece
            for number in range(40)
            for turn in plan.workload.session(number).turns
            for piece in turn.pieces()
        ]
        return {p.text for p in pieces if p.is_span}, {p.text for p in pieces if not p.is_span}

    assert said(first)[0] == said(second)[0] != said(alone)[0]
    assert not said(first)[1] & said(second)[1]


def test_popularity_follows_zipf() -> None:
    library = Library(0, "d", 20, (1, 1), 1.0, "shuffled")
    counts = Counter(number for index in range(3000) for number in library.pick(Random(index), 1))
    total = sum(1 / rank for rank in range(1, 21))
    for rank in (1, 2, 5):
        assert counts[rank - 1] / 3000 == pytest.approx(1 / rank / total, rel=0.2)


@given(st.integers(0, 99), st.floats(0, 3), st.sampled_from(["shuffled", "sorted"]))
def test_a_request_holds_no_document_twice(seed: int, zipf: float, order: str) -> None:
    chosen = Library(0, "d", 9, (1, 1), zipf, order).pick(Random(seed), 6)
    assert len(set(chosen)) == 6 <= len(chosen)
    assert order != "sorted" or chosen == sorted(chosen)


@pytest.mark.parametrize("name", ["conversation", "agent"])
def test_each_turn_goes_on_from_the_one_before(name: str, data: dict[str, Path]) -> None:
    for session in some(load(name, data), 9):
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            assert after.messages[: len(before.messages)] == before.messages
            assert len(after.messages) > len(before.messages)
            assert after.messages[len(before.messages)].role == "assistant"
        assert session.turns[0].pause == 0


@given(st.integers(0, 300), st.integers(0, 9))
def test_text_has_the_length_asked_for(words: int, key: int) -> None:
    assert len(text(words, key).split()) == words
    assert text(words, key) == text(words, key)


# -- traces -----------------------------------------------------------------------------------

RECORDS = st.lists(
    st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6), min_size=1, max_size=6
).map(lambda blocks: [Record(0.0, 512 * len(ids), 1, tuple(ids)) for ids in blocks])


@given(RECORDS)
def test_runs_are_the_same_blocks_wherever_they_occur(records: list[Record]) -> None:
    cut = shared_runs(records)
    uses = Counter(block for record in records for block in record.blocks)
    whole: dict[int, tuple[int, ...]] = {}
    for record, runs in zip(records, cut, strict=True):
        assert tuple(block for blocks, _ in runs for block in blocks) == record.blocks
        for blocks, is_shared in runs:
            assert {uses[block] > 1 for block in blocks} == {is_shared}
            if is_shared:
                assert all(whole.setdefault(block, blocks) == blocks for block in blocks)


def test_a_trace_shares_what_it_says(data: dict[str, Path]) -> None:
    plan = load("trace", data)
    sessions = some(plan)
    spans = [[p.text for p in session.turns[0].pieces() if p.is_span] for session in sessions]
    assert spans[0] == spans[1][:1] == spans[2][:1]
    assert spans[1] == spans[3] and spans[1][:2] == spans[2][:2]
    words = plan.settings["trace"]["block_words"]
    assert len(spans[0][0].split()) == words
    # Block 4 is partial in one record and whole in another: equal ids are equal text.
    assert len(spans[1][2].split()) == words
    own = next(p.text for p in sessions[0].turns[0].pieces() if not p.is_span)
    assert len(own.split()) == words + round((1100 - 2 * BLOCK_TOKENS) * words / BLOCK_TOKENS)
    low, high = plan.settings["output"]["max_tokens"]
    assert [s.turns[0].max_tokens for s in sessions] == [5, high, 7, 7] and low <= 5
    times = [arrival.at for _, arrival in workloads.planned(plan)]
    assert times == [t / 1000 / plan.settings["arrivals"]["speed"] for t in (0, 0, 3000, 6000)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 1}',
        '{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}',
    ],
)
def test_a_broken_line_of_a_trace_is_named(line: str) -> None:
    with pytest.raises(WorkloadError, match="t:2"):
        parse([json.dumps(TRACE[0]), line], "t")


def test_an_unsorted_trace_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"t:2.*sort"):
        parse([json.dumps(TRACE[2]), json.dumps(TRACE[0])], "t")


# -- questions --------------------------------------------------------------------------------


def test_each_round_asks_every_question_in_a_new_order(data: dict[str, Path]) -> None:
    plan = load("questions", data)
    assert isinstance(plan.arrivals, Closed) and plan.arrivals.sessions == 8
    turns = [session.turns[0] for session in some(plan, 8)]
    asked = [list(turn.pieces())[-1].text for turn in turns]
    assert sorted(asked[:4]) == sorted(asked[4:]) == sorted(q["question"] for q in QUESTIONS)
    passages: dict[str, set[tuple[str, ...]]] = {}
    for name, turn in zip(asked, turns, strict=True):
        spans = tuple(piece.text for piece in turn.pieces() if piece.is_span)
        passages.setdefault(name, set()).add(spans)
    assert all(len({frozenset(order) for order in orders}) == 1 for orders in passages.values())
    assert any(len(orders) > 1 for orders in passages.values())


NO_QUESTIONS = [
    "{",
    "{}",
    "[]",
    '[{"question": "q", "ctxs": []}]',
    '[{"question": "", "ctxs": [{"text": "t"}]}]',
    '[{"question": "q", "ctxs": [{"text": ""}]}]',
]


@pytest.mark.parametrize("content", NO_QUESTIONS)
def test_a_broken_file_of_questions_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "q.json"
    file.write_text(content)
    with pytest.raises(WorkloadError, match=r"q\.json"):
        workloads.load(FILES[NAMES.index("questions")], file)
