"""Prevents a wrong number: a first token that was only a role, a broken answer that counts as served, and the like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.fake_plan import BROKEN, TAILS, FakePlan, steps
from loadtests.outcome import Outcome, of_status
from loadtests.stream import Answer, Limits
from tests.loadtests.splits import cuts

SENT = 100.0


def play(plan: FakePlan, is_chat: bool = True, prompt_tokens: int = 7) -> Answer:
    """An answer over a network that takes no time."""
    answer = Answer(SENT)
    answer.head(SENT, plan.status, plan.content_type)
    now = SENT
    for step in steps(plan, is_chat, prompt_tokens):
        now = SENT + step.at
        answer.body(now, step.data)
    answer.fail(now, "reset") if plan.tail == "cut" else answer.end(now)
    return answer


def event(content: Any) -> bytes:
    return (
        b"data: "
        + (content if isinstance(content, bytes) else json.dumps(content).encode())
        + b"\n\n"
    )


def delta(**content: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": content, "finish_reason": None}]})


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
DONE = b"data: [DONE]\n\n"

TIMES = st.floats(0, 10, allow_nan=False).map(lambda value: round(value, 3))
PLANS = st.builds(
    FakePlan,
    first_delay=TIMES,
    token_gap=TIMES,
    tokens=st.integers(1, 20),
    tokens_per_chunk=st.integers(1, 3),
    role_chunk=st.booleans(),
    reasoning=st.integers(0, 3),
    comment_every=st.sampled_from([0.0, 1.5]),
)


@given(PLANS, st.booleans())
def test_times_and_tokens_are_those_of_the_plan(plan: FakePlan, is_chat: bool) -> None:
    answer = play(plan, is_chat)
    chunks = -(-plan.tokens // plan.tokens_per_chunk)
    assert answer.outcome is Outcome.OK
    assert answer.ttft == pytest.approx(plan.first_delay)
    assert answer.gaps == pytest.approx([plan.token_gap] * (chunks - 1))
    assert answer.e2e == pytest.approx(plan.first_delay + plan.token_gap * (chunks - 1))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, plan.tokens)
    if chunks > 1:
        assert answer.tpot == pytest.approx(plan.token_gap * (chunks - 1) / (plan.tokens - 1))
    if plan.comment_every and plan.first_delay > plan.comment_every:
        assert answer.comments


@given(st.data(), PLANS, st.sampled_from(TAILS), st.sampled_from(BROKEN))
def test_cuts_change_nothing(data: st.DataObject, plan: FakePlan, tail: str, broken: str) -> None:
    plan = FakePlan(**{**vars(plan), "tail": tail, "broken": broken})
    stream = b"".join(step.data for step in steps(plan, True, 7))
    answers = []
    for pieces in ([stream], data.draw(cuts(stream))):
        answer = Answer(SENT)
        answer.head(SENT, 200)
        for piece in pieces:
            answer.body(SENT + 1, piece)
        answer.end(SENT + 1)
        answers.append(answer)
    whole, cut = answers
    assert (whole.outcome, whole.chunks, whole.usage) == (cut.outcome, cut.chunks, cut.usage)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.OK),
        ({"tokens": 0}, Outcome.EMPTY),
        ({"tail": "no_done"}, Outcome.NO_DONE),
        ({"tail": "half_event"}, Outcome.NO_DONE),
        ({"tail": "cut"}, Outcome.CUT_OFF),
        ({"tail": "error_event"}, Outcome.ERROR_EVENT),
        ({"tail": "no_usage"}, Outcome.NO_USAGE),
        ({"tail": "no_finish"}, Outcome.NO_FINISH),
        ({"tail": "after_done"}, Outcome.BAD_EVENT),
        ({"broken": "json"}, Outcome.BAD_JSON),
        ({"broken": "utf8"}, Outcome.BAD_UTF8),
        ({"broken": "event"}, Outcome.BAD_EVENT),
        ({"status": 429}, Outcome.HTTP_429),
        ({"status": 400}, Outcome.HTTP_4XX),
        ({"status": 503}, Outcome.HTTP_5XX),
        ({"status": 302}, Outcome.HTTP_OTHER),
        ({"content_type": "application/json"}, Outcome.NOT_A_STREAM),
    ],
)
def test_each_misbehaviour_has_its_class(changes: dict[str, Any], outcome: Outcome) -> None:
    answer = play(FakePlan(**changes))
    assert answer.outcome is outcome
    assert (
        outcome is Outcome.OK
        or answer.detail
        or outcome
        in (
            Outcome.EMPTY,
            Outcome.NO_USAGE,
            Outcome.NO_FINISH,
        )
    )


@given(st.integers(100, 599))
def test_only_200_is_no_error(status: int) -> None:
    assert (of_status(status) is None) == (status == 200)


def test_what_shows_nothing_is_no_token() -> None:
    answer = Answer(SENT)
    answer.head(SENT + 1, 200)
    answer.body(SENT + 1, delta(role="assistant", content="") + delta() + delta(content=None))
    answer.body(SENT + 1, delta(tool_calls=[{"function": {"name": None, "arguments": ""}}]))
    assert answer.ttft is None
    answer.body(SENT + 2, delta(reasoning_content="hm"))
    answer.body(SENT + 5, delta(content="x"))
    assert (answer.ttft, answer.first_answer_at, answer.gaps) == (2.0, SENT + 5, [3.0])


@pytest.mark.parametrize(
    "shown",
    [
        {"content": " "},
        {"reasoning": "r"},
        {"refusal": "no"},
        {"tool_calls": [{"function": {"name": "read"}}]},
        {"tool_calls": [{"function": {"arguments": "{"}}]},
    ],
)
def test_what_shows_something_is_a_token(shown: dict[str, Any]) -> None:
    answer = Answer(SENT)
    answer.head(SENT, 200)
    answer.body(SENT + 3, delta(**shown))
    assert answer.ttft == 3.0


@pytest.mark.parametrize(
    "chunk",
    [
        [],
        {"choices": None},
        {"choices": [{"index": 1, "delta": {"content": "x"}}]},
        {"choices": [{"index": 0, "delta": {"content": 7}}]},
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 1}},
        {"choices": [], "usage": {"prompt_tokens": True, "completion_tokens": 1}},
        {"choices": [], "usage": {"completion_tokens": 1}},
    ],
)
def test_json_that_is_no_chunk_is_refused(chunk: Any) -> None:
    answer = Answer(SENT)
    answer.head(SENT, 200)
    answer.body(SENT, event(chunk))
    assert answer.outcome is Outcome.BAD_EVENT


KEYS = [
    "choices",
    "index",
    "delta",
    "text",
    "content",
    "usage",
    "tool_calls",
    "function",
    "prompt_tokens",
    "error",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@given(JSON)
def test_no_json_is_an_exception(chunk: Any) -> None:
    answer = Answer(SENT)
    answer.head(SENT, 200)
    answer.body(SENT, event(chunk))
    answer.end(SENT)
    assert answer.outcome not in (None, Outcome.OK)


def test_the_first_cause_wins() -> None:
    answer = Answer(SENT)
    answer.head(SENT, 200)
    answer.body(SENT + 1, event(b"{"))
    answer.body(SENT + 2, delta(content="x"))
    answer.fail(SENT + 3, "reset")
    assert (answer.outcome, answer.chunks, answer.e2e) == (Outcome.BAD_JSON, 0, 1.0)


def test_a_connection_that_breaks_before_the_head_is_another_class() -> None:
    for end in (lambda a: a.fail(SENT + 1, "refused"), lambda a: a.end(SENT + 1)):
        answer = Answer(SENT)
        end(answer)
        assert answer.outcome is Outcome.CONNECTION


def test_an_answer_with_its_done_is_whole_even_if_the_connection_then_breaks() -> None:
    answer = Answer(SENT)
    answer.head(SENT, 200)
    answer.body(SENT + 1, delta(content="x") + FINISH + USAGE + DONE)
    assert answer.outcome is None  # what follows could still be wrong
    answer.fail(SENT + 9, "reset")
    assert (answer.outcome, answer.e2e) == (Outcome.OK, 1.0)


def test_limits() -> None:
    limits = Limits(first_token=5.0, stall=2.0, total=20.0)
    waiting = Answer(SENT, limits)
    waiting.head(SENT + 1, 200)
    waiting.body(SENT + 4, b": keep-alive\n\n" + delta(role="assistant"))  # is no sign of a token
    assert not waiting.expire(SENT + 4.9)
    assert waiting.expire(waiting.deadline())
    assert waiting.outcome is Outcome.NO_FIRST_TOKEN

    stalled = Answer(SENT, limits)
    stalled.head(SENT, 200)
    stalled.body(SENT + 4, delta(content="x"))
    assert not stalled.expire(SENT + 5.9)
    assert stalled.expire(SENT + 6)
    assert stalled.outcome is Outcome.STALL

    long = Answer(SENT, limits)
    long.head(SENT, 200)
    for second in range(1, 20):
        long.body(SENT + second, delta(content="x"))
        assert not long.expire(SENT + second)
    assert long.deadline() == SENT + 20
    assert long.expire(SENT + 20)
    assert long.outcome is Outcome.TOO_LONG


def test_an_open_connection_after_done_is_no_stall() -> None:
    answer = Answer(SENT, Limits(first_token=5.0, stall=2.0, total=20.0))
    answer.head(SENT, 200)
    answer.body(SENT + 1, delta(content="x") + FINISH + USAGE + DONE)
    assert answer.expire(SENT + 30)
    assert (answer.outcome, answer.e2e) == (Outcome.OK, 1.0)


def test_usage_of_a_server_with_spans() -> None:
    usage = {
        "prompt_tokens": 90,
        "completion_tokens": 1,
        "span_pad_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    answer = Answer(SENT)
    answer.head(SENT, 200)
    answer.body(SENT, delta(content="x") + event({"choices": [], "usage": usage}))
    assert answer.usage is not None
    assert (answer.usage.pad_tokens, answer.usage.cached_tokens) == (12, 32)


def test_a_cancelled_answer_is_neither_served_nor_the_servers_fault() -> None:
    answer = Answer(SENT)
    answer.cancel(SENT + 1)
    answer.end(SENT + 2)
    assert (answer.outcome, answer.e2e) == (Outcome.CANCELLED, 1.0)
