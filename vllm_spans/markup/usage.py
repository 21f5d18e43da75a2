"""Pads in usage: ``usage.span_pad_tokens``, a part of ``prompt_tokens``; pure."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

FIELD = "span_pad_tokens"
_PREFIX = "data: "


def add_to_response(response: Any, pad_tokens: int) -> Any:
    """Report pads in a response object's usage.

    Args:
        response: A response model of vLLM; one without usage (an error) is left alone.
        pad_tokens: Pads of all prompts of the request.

    Returns:
        The response.
    """
    if (usage := getattr(response, "usage", None)) is not None:
        setattr(usage, FIELD, pad_tokens)
    return response


async def add_to_stream(
    stream: AsyncGenerator[str, None], pad_tokens: int
) -> AsyncGenerator[str, None]:
    """Report pads in every usage of a stream of server-sent events.

    Args:
        stream: vLLM's events, each one string.
        pad_tokens: Pads of all prompts of the request.
    """
    async with aclosing(stream):
        async for event in stream:
            yield _add_to_event(event, pad_tokens)


def _add_to_event(event: str, pad_tokens: int) -> str:
    if '"usage":{' not in event or not event.startswith(_PREFIX):
        return event
    body = event[len(_PREFIX) :]
    payload = json.loads(body)
    # The text may hold the same characters, so only a usage at the top counts.
    if not isinstance(payload.get("usage"), dict):
        return event
    payload["usage"][FIELD] = pad_tokens
    end = body[len(body.rstrip()) :]
    return f"{_PREFIX}{json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}{end}"
