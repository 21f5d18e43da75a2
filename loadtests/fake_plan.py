"""What the fake server does with a request: exact times and every kind of misbehaviour; pure.

A request carries its plan as ``fake_plan`` in its body. All times are seconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadtests.fields import Fields

SPLITS = ("none", "character", "frame", "line_end")
TAILS = (
    "whole",
    "no_done",  # ends in order without [DONE]
    "half_event",  # ends in order inside an event
    "cut",  # the connection breaks
    "error_event",
    "no_usage",
    "no_finish",
    "after_done",  # goes on after [DONE]
)
BROKEN = ("none", "json", "utf8", "event")
_TOKEN = "wörd "  # not ASCII, so that a character can be split


@dataclass(frozen=True)
class FakePlan:
    """One answer.

    Attributes:
        status: HTTP status; but for 200 the answer is an error at once, after ``first_delay``.
        content_type: Of the answer.
        refuse: Close the connection before any answer.
        first_delay: From the request to the first visible token.
        token_gap: Between tokens.
        tokens: Visible tokens.
        tokens_per_chunk: Tokens in one chunk, as a busy engine sends them.
        role_chunk: Send a chunk with the role, and one with an empty delta, at once.
        reasoning: Of the first tokens this many are reasoning.
        comment_every: Send a comment this often while waiting for the first token; 0: never.
        split: Where chunks are cut, with a pause between: inside a character, inside the frame of HTTP, or between the
            two line ends of an event.
        split_pause: That pause.
        broken: The chunk in the middle holds broken JSON, broken UTF-8, or no chunk of an answer.
        stall_after: Tokens after which it is silent for ``stall``; ``None``: never.
        stall: How long.
        tail: How it ends.
    """

    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"
    refuse: bool = False
    first_delay: float = 0.0
    token_gap: float = 0.0
    tokens: int = 4
    tokens_per_chunk: int = 1
    role_chunk: bool = True
    reasoning: int = 0
    comment_every: float = 0.0
    split: str = "none"
    split_pause: float = 0.002
    broken: str = "none"
    stall_after: int | None = None
    stall: float = 0.0
    tail: str = "whole"

    @classmethod
    def read(cls, table: object) -> FakePlan:
        """From the body's ``fake_plan``.

        Raises:
            WorkloadError: It is wrong.
        """
        fields = Fields(table, "fake_plan")
        plan = cls(
            status=fields.integer("status", cls.status, low=100),
            content_type=fields.text("content_type", cls.content_type),
            refuse=fields.flag("refuse", cls.refuse),
            first_delay=fields.number("first_delay", cls.first_delay),
            token_gap=fields.number("token_gap", cls.token_gap),
            tokens=fields.integer("tokens", cls.tokens),
            tokens_per_chunk=fields.integer("tokens_per_chunk", cls.tokens_per_chunk, low=1),
            role_chunk=fields.flag("role_chunk", cls.role_chunk),
            reasoning=fields.integer("reasoning", cls.reasoning),
            comment_every=fields.number("comment_every", cls.comment_every),
            split=fields.choice("split", SPLITS, cls.split),
            split_pause=fields.number("split_pause", cls.split_pause),
            broken=fields.choice("broken", BROKEN, cls.broken),
            stall_after=fields.integer("stall_after") if fields.has("stall_after") else None,
            stall=fields.number("stall", cls.stall),
            tail=fields.choice("tail", TAILS, cls.tail),
        )
        fields.finish()
        return plan


@dataclass(frozen=True, slots=True)
class Step:
    """Something to send.

    Attributes:
        at: Seconds from the request's arrival.
        data: Bytes of the body.
        is_visible: Whether a client can show something once all of them are there.
        is_done: Whether they hold ``[DONE]``.
    """

    at: float
    data: bytes
    is_visible: bool = False
    is_done: bool = False


def steps(plan: FakePlan, is_chat: bool, prompt_tokens: int) -> Iterator[Step]:
    """What a plan sends, in order.

    Args:
        plan: The plan of an answer with status 200.
        is_chat: ``/v1/chat/completions``, else ``/v1/completions``.
        prompt_tokens: For the usage.
    """
    if plan.role_chunk and is_chat:
        yield Step(0.0, _event(_choice({"role": "assistant", "content": ""})))
        yield Step(0.0, _event(_choice({})))
    if plan.comment_every:
        for count in itertools.count(1):
            if count * plan.comment_every >= plan.first_delay:
                break
            yield Step(count * plan.comment_every, b": keep-alive\n\n")
    at, sent = plan.first_delay, 0
    chunks = -(-plan.tokens // plan.tokens_per_chunk)
    for chunk in range(chunks):
        if chunk:
            at += plan.token_gap
        if plan.stall_after is not None and sent >= plan.stall_after > sent - plan.tokens_per_chunk:
            at += plan.stall
        if plan.broken != "none" and chunk == chunks // 2:
            yield Step(at, _broken(plan.broken))
        count = min(plan.tokens_per_chunk, plan.tokens - sent)
        data = _event(_text(_TOKEN * count, is_chat, is_reasoning=sent < plan.reasoning))
        yield Step(at, data, is_visible=True)
        sent += count
    yield from _tail(plan, at, is_chat, prompt_tokens, sent)


def _tail(
    plan: FakePlan, at: float, is_chat: bool, prompt_tokens: int, sent: int
) -> Iterator[Step]:
    if plan.tail == "error_event":
        yield Step(at, _event({"error": {"message": "the engine has died", "code": 500}}))
        return
    if plan.tail in ("half_event", "cut"):
        yield Step(at, _event(_text(_TOKEN, is_chat))[:-7])
        return
    if plan.tail != "no_finish":
        last = _choice({}) if is_chat else _text("", is_chat)
        last["choices"][0]["finish_reason"] = "length"
        yield Step(at, _event(last))
    if plan.tail != "no_usage":
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sent,
            "total_tokens": prompt_tokens + sent,
        }
        yield Step(at, _event({"choices": [], "usage": usage}))
    if plan.tail != "no_done":
        yield Step(at, b"data: [DONE]\n\n", is_done=True)
    if plan.tail == "after_done":
        yield Step(at, _event(_text(_TOKEN, is_chat)))


def pieces(data: bytes, split: str) -> list[bytes]:
    """Cut the bytes of a step; the pieces joined are the bytes again."""
    if split == "character":
        lead = next((i for i, byte in enumerate(data) if byte >= 0xC0), None)
        cut = len(data) // 2 if lead is None else lead + 1
    elif split == "line_end":
        cut = len(data) - 1
    elif split == "frame":
        cut = len(data) // 2
    else:
        return [data]
    return [part for part in (data[:cut], data[cut:]) if part]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }


def _text(text: str, is_chat: bool, is_reasoning: bool = False) -> dict[str, Any]:
    if is_chat:
        return _choice({"reasoning_content" if is_reasoning else "content": text})
    return {
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": None}],
    }


def _broken(kind: str) -> bytes:
    contents = {
        "json": b'{"choices": [',
        "utf8": b'{"choices": "\xff\xc3"}',
        "event": b'["nothing"]',
    }
    return b"data: " + contents[kind] + b"\n\n"
