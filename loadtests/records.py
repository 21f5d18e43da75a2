"""Raw records: a line of JSON for everything that happens, written at once; pure but for the files.

A record that is on disk survives Ctrl-C and a worker that is killed, so every report can be made from the files alone.
A request leaves two lines: ``sent`` before it is sent, ``answer`` when it is over. One without the other was lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.outcome import Outcome
from loadtests.prompts import request_id
from loadtests.stream import Answer, Usage

_DIGITS = 6  # microseconds


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds from the start of the run.

    Attributes:
        session: Number of its session.
        turn: Its place in the session.
        stage: Stage of the arrivals.
        planned: When it should have been sent.
        outcome: How it ended.
        worker: Which process sent it.
        sent: When it was sent.
        ttft: Seconds to the first visible token.
        answer_ttft: Seconds to the first token that is no reasoning.
        gaps: Seconds between visible chunks.
        e2e: Seconds to the end.
        tpot: Seconds per output token after the first.
        chunks: Visible chunks.
        prompt_tokens: Of the server's usage.
        completion_tokens: Of the server's usage.
        cached_tokens: Of the server's usage, if it says so.
        pad_tokens: Of the server's usage.
        status: HTTP status.
        detail: Why it failed.
    """

    session: int
    turn: int
    stage: int
    planned: float
    outcome: Outcome
    worker: int = 0
    sent: float | None = None
    ttft: float | None = None
    answer_ttft: float | None = None
    gaps: tuple[float, ...] = ()
    e2e: float | None = None
    tpot: float | None = None
    chunks: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    pad_tokens: int = 0
    status: int | None = None
    detail: str = ""

    @property
    def id(self) -> str:
        """Its name in the records of every server."""
        return request_id(self.session, self.turn)

    @property
    def delay(self) -> float | None:
        """Seconds from the planned to the actual sending: the generator's fault."""
        return None if self.sent is None else self.sent - self.planned


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the plan; fields as in ``Record``."""

    session: int
    turn: int
    stage: int
    planned: float
    worker: int


def sent_line(place: Place) -> dict[str, Any]:
    """Written before sending."""
    return {"type": "sent", **asdict(place), "planned": round(place.planned, _DIGITS)}


def answer_line(place: Place, answer: Answer, start: float) -> dict[str, Any]:
    """Written when a request is over.

    Args:
        place: The request.
        answer: Its answer, whose times are of the monotonic clock.
        start: Start of the run on that clock.
    """
    assert answer.outcome is not None
    usage = answer.usage or Usage(0, 0)
    first = answer.first_answer_at
    return {
        **sent_line(place),
        "type": "answer",
        "outcome": answer.outcome.value,
        "sent": _rounded(answer.sent - start),
        "ttft": _rounded(answer.ttft),
        "answer_ttft": _rounded(None if first is None else first - answer.sent),
        "gaps": [round(gap, _DIGITS) for gap in answer.gaps],
        "e2e": _rounded(answer.e2e),
        "tpot": _rounded(answer.tpot),
        "chunks": answer.chunks,
        "prompt_tokens": usage.prompt_tokens if answer.usage else None,
        "completion_tokens": usage.completion_tokens if answer.usage else None,
        "cached_tokens": usage.cached_tokens,
        "pad_tokens": usage.pad_tokens,
        "status": answer.status,
        "detail": answer.detail,
    }


def unsent_line(place: Place, detail: str) -> dict[str, Any]:
    """Written for a turn that is given up before it is sent."""
    return {
        **sent_line(place),
        "type": "answer",
        "outcome": Outcome.NOT_SENT.value,
        "detail": detail,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


class Writer:
    """Appends lines to a file, each with one system call and no buffer.

    Args:
        path: The file; it is made.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(path, flags, 0o644)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        os.write(self._file, json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass
class Log:
    """What the files of a run's workers say.

    Attributes:
        records: Requests, in the order of their planned times.
        health: How the generator was, per second and worker: ``at``, ``worker``, ``lag`` (greatest, in seconds) and
            ``cpu`` (share of a core).
        finished: Workers that ended by themselves.
    """

    records: list[Record] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)


def read(paths: Iterable[Path]) -> Log:
    """Read the files of the workers.

    A last line that is not whole is left out: its worker was killed while writing it. A request that was sent and has
    no end is ``LOST``.

    Raises:
        ValueError: Another line is broken.
    """
    log = Log()
    for path in paths:
        sent: dict[tuple[int, int], dict[str, Any]] = {}
        for line in _lines(path):
            kind = line.pop("type")
            if kind == "sent":
                sent[line["session"], line["turn"]] = line
            elif kind == "answer":
                sent.pop((line["session"], line["turn"]), None)
                log.records.append(_record(line))
            elif kind == "health":
                log.health.append(line)
            elif kind == "end":
                log.finished.add(line["worker"])
        log.records += [_record({**line, "outcome": Outcome.LOST.value}) for line in sent.values()]
    log.records.sort(key=lambda record: (record.planned, record.session, record.turn))
    return log


def _lines(path: Path) -> list[dict[str, Any]]:
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def _record(line: dict[str, Any]) -> Record:
    gaps = tuple(line.pop("gaps", ()))
    return Record(**{**line, "outcome": Outcome(line["outcome"])}, gaps=gaps)
