"""Prevents records that are lost, doubled or misread when a worker is killed in the middle of a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.fake_plan import FakePlan
from loadtests.outcome import Outcome
from loadtests.records import Log, Place, Writer, answer_line, read, sent_line, unsent_line
from tests.loadtests.test_stream import SENT, play

START = SENT - 2.0


def write(path: Path, lines: list[dict[str, object]]) -> None:
    writer = Writer(path)
    for line in lines:
        writer.write(line)
    writer.close()


def place(session: int, turn: int = 0, worker: int = 0) -> Place:
    return Place(session, turn, 0, 1.5, worker)


def test_an_answer_is_read_as_it_was_measured(tmp_path: Path) -> None:
    answer = play(FakePlan(first_delay=0.25, token_gap=0.125, tokens=3, reasoning=1))
    write(tmp_path / "a", [sent_line(place(7, 2)), answer_line(place(7, 2), answer, START)])
    (record,) = read([tmp_path / "a"]).records
    assert (record.id, record.outcome, record.sent, record.delay) == ("7.2", Outcome.OK, 2.0, 0.5)
    assert (record.ttft, record.answer_ttft, record.e2e) == (0.25, 0.375, 0.5)
    assert (record.gaps, record.tpot, record.chunks) == ((0.125, 0.125), 0.125, 3)
    assert (record.prompt_tokens, record.completion_tokens, record.status) == (7, 3, 200)


@given(st.integers(0, 2000))
def test_a_file_that_was_cut_anywhere_is_read_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    lines = []
    for session in range(3):
        lines.append(sent_line(place(session)))
        lines.append(answer_line(place(session), play(FakePlan()), START))
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    cut = min(cut, len(data))
    path = tmp_path_factory.mktemp("cut") / "a"
    path.write_bytes(data[:cut])
    log = read([path])
    whole = data[:cut].count(b"\n")
    assert [r.session for r in log.records] == list(range((whole + 1) // 2))
    lost = [r for r in log.records if r.outcome is Outcome.LOST]
    assert len(lost) == whole % 2
    assert all(r.outcome is Outcome.OK for r in log.records if r not in lost)


def test_a_broken_line_in_the_middle_is_no_torn_tail(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"type": "sent"\n{"type": "end", "worker": 0}\n')
    with pytest.raises(ValueError):
        read([tmp_path / "a"])


def test_files_of_workers_are_joined(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    write(one, [unsent_line(place(1), "why"), {"type": "end", "worker": 0}])
    health = {"type": "health", "worker": 1, "at": 1.0, "lag": 0.1, "cpu": 0.5}
    write(two, [sent_line(place(0, worker=1)), health])
    log: Log = read([one, two])
    assert [(r.session, r.outcome) for r in log.records] == [
        (0, Outcome.LOST),
        (1, Outcome.NOT_SENT),
    ]
    assert log.records[1].detail == "why"
    assert log.finished == {0} and log.health[0]["lag"] == 0.1
