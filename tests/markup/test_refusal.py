"""Endpoints that spans do not reach, and pads in usage: without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.refusal import RefuseSpans, find_span
from vllm_spans.markup.usage import add_to_response, add_to_stream

PART = {"type": "text", "text": "a", "span": True}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": [{"content": [{"type": "text"}, PART]}]}, "messages[0].content[1].span"),
        ({"system": [PART]}, "system[0].span"),
        (
            {"messages": [{"content": [{"type": "tool_result", "content": [PART]}]}]},
            "messages[0].content[0].content[0].span",
        ),
        (
            {"input": [{"type": "function_call_output", "output": [PART]}]},
            "input[0].output[0].span",
        ),
        ({"spans": {"gap_policy": "none"}}, "spans"),
        ({"vllm_xargs": {"span_starts": [0]}}, "vllm_xargs.span_starts"),
        ({"messages": [{"content": "span"}]}, None),
        ({"messages": [{"content": [{**PART, "span": False}]}]}, None),
        ({"tools": [{"type": "custom", "span": True}]}, None),
        ({"messages": [{"content": [{"type": "tool_use", "input": PART}]}]}, None),
        ([], None),
        ("span", None),
    ],
)
def test_where_a_body_marks_a_span(body: Any, where: str | None) -> None:
    assert find_span(body) == where


def send(path: str, chunks: list[bytes], method: str = "POST") -> Any:
    """Send a request through the middleware: the error, or the body that the application read."""
    got: dict[str, Any] = {"error": None, "body": None}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        got["body"] = body

    def respond(error: MarkupError) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            got["error"] = error

        return answer

    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    scope = {"type": "http", "method": method, "path": path, "root_path": ""}
    asyncio.run(RefuseSpans(app, respond)(scope, receive, receive))
    return got


def test_a_marked_body_is_refused_also_in_chunks() -> None:
    body = json.dumps({"messages": [{"content": [PART]}]}).encode()
    for path in ("/v1/messages", "/v1/responses"):
        got = send(path, [body[:20], body[20:]])
        assert got["error"].param == "messages[0].content[0].span"
        assert path in str(got["error"])
        assert got["body"] is None


@pytest.mark.parametrize("body", [b"{}", b'{"spans', b'{"x": "span"}', b""])
def test_other_bodies_pass_as_they_are(body: bytes) -> None:
    assert send("/v1/messages", [body]) == {"error": None, "body": body}


def test_other_paths_are_not_read() -> None:
    body = json.dumps({"messages": [{"content": [PART]}]}).encode()
    assert send("/v1/chat/completions", [body]) == {"error": None, "body": body}


def test_pads_in_a_response() -> None:
    response = SimpleNamespace(usage=SimpleNamespace(prompt_tokens=5))
    assert add_to_response(response, 3).usage.span_pad_tokens == 3
    assert add_to_response(error := SimpleNamespace(error="x"), 3) is error


def test_pads_in_a_stream() -> None:
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield 'data: {"choices":[{"delta":{"content":"\\"usage\\":{ é"}}]}\n\n'
            yield 'data: {"choices":[{"delta":{"content":"x","usage":{"a":1}}}]}\n\n'
            yield 'data: {"choices":[],"usage":{"prompt_tokens":5}}\n\n'
            yield ": keep alive\n\n"
            yield "data: [DONE]\n\n"
        finally:
            closed.append(True)

    async def collect() -> list[str]:
        return [event async for event in add_to_stream(events(), 3)]

    assert asyncio.run(collect()) == [
        'data: {"choices":[{"delta":{"content":"\\"usage\\":{ é"}}]}\n\n',
        'data: {"choices":[{"delta":{"content":"x","usage":{"a":1}}}]}\n\n',
        'data: {"choices":[],"usage":{"prompt_tokens":5,"span_pad_tokens":3}}\n\n',
        ": keep alive\n\n",
        "data: [DONE]\n\n",
    ]
    assert closed

    async def abandon() -> None:
        stream = add_to_stream(events(), 3)
        await anext(stream)
        await stream.aclose()

    closed.clear()
    asyncio.run(abandon())
    assert closed, "a client that leaves must end vLLM's own generator"
