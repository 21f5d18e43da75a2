"""Prevents misbehaviour of a real connection from being counted as another class, and times from being made up.

A measured time is judged against the server's own record on the same clock: what the client saw cannot be earlier
than what the server sent, and the server never sends early. That holds however slow the machine is.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from loadtests.fake_plan import SPLITS, FakePlan, pieces, steps
from loadtests.outcome import Outcome
from loadtests.stream import Answer, Limits
from loadtests.transport import Target, send
from tests.loadtests.fake import FakeProcess


def ask(target: Target, body: bytes, name: str = "x") -> Answer:
    answer = target.answer()
    send(target, "/v1/completions", body, name, answer)
    return answer


@pytest.fixture(scope="module")
def server() -> Iterator[FakeProcess]:
    with FakeProcess() as process:
        yield process


CASES: list[tuple[dict[str, Any], dict[str, float], Outcome]] = [
    ({}, {}, Outcome.OK),
    ({"tokens": 30, "tokens_per_chunk": 4}, {}, Outcome.OK),
    ({"comment_every": 0.01, "first_delay": 0.05}, {}, Outcome.OK),
    *(({"split": split, "tokens": 6}, {}, Outcome.OK) for split in SPLITS),
    ({"tokens": 0}, {}, Outcome.EMPTY),
    ({"tail": "no_done"}, {}, Outcome.NO_DONE),
    ({"tail": "half_event"}, {}, Outcome.NO_DONE),
    ({"tail": "cut"}, {}, Outcome.CUT_OFF),
    ({"tail": "error_event"}, {}, Outcome.ERROR_EVENT),
    ({"tail": "no_usage"}, {}, Outcome.NO_USAGE),
    ({"tail": "no_finish"}, {}, Outcome.NO_FINISH),
    ({"tail": "after_done"}, {}, Outcome.BAD_EVENT),
    ({"broken": "json"}, {}, Outcome.BAD_JSON),
    ({"broken": "utf8"}, {}, Outcome.BAD_UTF8),
    ({"broken": "event"}, {}, Outcome.BAD_EVENT),
    ({"status": 429}, {}, Outcome.HTTP_429),
    ({"status": 404}, {}, Outcome.HTTP_4XX),
    ({"status": 500}, {}, Outcome.HTTP_5XX),
    ({"content_type": "application/json"}, {}, Outcome.NOT_A_STREAM),
    ({"refuse": True}, {}, Outcome.CONNECTION),
    ({"first_delay": 60}, {"first_token": 0.3}, Outcome.NO_FIRST_TOKEN),
    ({"first_delay": 60, "comment_every": 0.02}, {"first_token": 0.3}, Outcome.NO_FIRST_TOKEN),
    ({"stall_after": 2, "stall": 60}, {"stall": 0.3}, Outcome.STALL),
    ({"tokens": 1000, "token_gap": 0.05}, {"total": 0.5}, Outcome.TOO_LONG),
]


@pytest.mark.parametrize(
    ("plan", "limits", "outcome"),
    CASES,
    ids=[f"{plan}".strip("{}") or "plain" for plan, _, _ in CASES],
)
def test_each_misbehaviour_lands_in_its_class(
    server: FakeProcess,
    plan: dict[str, Any],
    limits: dict[str, float],
    outcome: Outcome,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.name.replace(" ", "")
    name = "".join(c for c in name if c.isascii() and c.isprintable())
    answer = server.ask(name, plan, **limits)
    assert answer.outcome is outcome, answer.detail
    seen = server.log()[name]
    assert answer.sent <= seen["arrived"]
    for at, first in zip([answer.first_token_at], seen["visible"], strict=False):
        assert at is None or at >= first
    if outcome is Outcome.OK:
        planned = [step for step in steps(FakePlan.read(plan), True, 3) if step.is_visible]
        assert answer.chunks == len(planned) == len(seen["visible"])
        assert answer.usage.completion_tokens == plan.get("tokens", 4)
        assert answer.usage.prompt_tokens == 3
        assert answer.last_token_at >= seen["visible"][-1]
        assert answer.ended_at >= seen["done"]
        for step, at in zip(planned, seen["visible"], strict=True):
            assert at >= seen["arrived"] + step.at
    if outcome in (Outcome.NO_FIRST_TOKEN, Outcome.STALL, Outcome.TOO_LONG):
        (limit,) = limits.values()
        begin = {Outcome.STALL: answer.last_token_at}.get(outcome, answer.sent)
        assert answer.ended_at - begin >= limit


def test_an_errors_text_is_kept(server: FakeProcess) -> None:
    assert "status 429 as planned" in server.ask("text", {"status": 429}).detail
    assert "fake_plan.statu is not known" in server.ask("bad plan", {"statu": 429}).detail


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        answer = ask(Target(f"http://127.0.0.1:{port}"), b"{}", "x")
    assert answer.outcome is Outcome.CONNECTION
    assert "refused" in answer.detail.lower()


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}", limits=Limits(first_token=0.2))
        assert ask(target, b"{}", "x").outcome is Outcome.NO_FIRST_TOKEN


def test_what_is_sent_is_what_was_asked_for() -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while not received or not b"".join(received).endswith(b'{"a": 1}'):
                    received.append(connection.recv(65536))

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}/prefix/v1/", api_key="secret")
        assert ask(target, b'{"a": 1}', "7.0").outcome is Outcome.CONNECTION
        thread.join()
    head = b"".join(received).decode().lower()
    assert head.startswith("post /prefix/v1/completions http/1.1")
    assert "authorization: bearer secret" in head and "x-request-id: 7.0" in head


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Target(url)


def test_the_fake_servers_counters(server: FakeProcess) -> None:
    def count(name: str) -> float:
        lines = [
            line for line in server.get("/metrics").splitlines() if line.startswith(name + "{")
        ]
        return float(lines[0].split()[-1])

    before = count("vllm:generation_tokens_total")
    server.ask("counted", {"tokens": 9})
    server.ask("refused", {"status": 500})
    assert count("vllm:generation_tokens_total") == before + 9
    assert server.get("/health") == ""
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "fake"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("data", [b"data: w\xc3\xb6rd\n\n", b"data: x\n\n", b": c\n\n"])
def test_cut_pieces_are_the_whole(split: str, data: bytes) -> None:
    found = pieces(data, split)
    assert b"".join(found) == data
    assert len(found) == (1 if split == "none" else 2)
    if split == "character" and b"\xc3" in data:
        assert found[0].endswith(b"\xc3")
