"""Endpoints that spans do not reach refuse them by name, as ASGI middleware.

vLLM's model of ``/v1/messages`` drops keys that it does not know before any of its code runs, so the
body itself has to be looked at. A body without the word ``span`` passes unparsed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_spans.markup.errors import MarkupError

REFUSING_PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/cohere/v2/chat")
# Free JSON of the client's own, where a key `span` means whatever it means there.
_FOREIGN_KEYS = ("tools", "metadata", "text", "arguments")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def find_span(body: Any, path: str = "") -> str | None:
    """Where a JSON body marks a span, ``None`` if nowhere.

    Args:
        body: The parsed body.
        path: Where the body stands in a larger one.
    """
    if isinstance(body, dict):
        if body.get("span") is True and isinstance(body.get("type"), str):
            return f"{path}.span"
        if body.get("type") == "tool_use":
            return None
        if not path:
            if body.get("spans") is not None:
                return "spans"
            xargs = body.get("vllm_xargs")
            for key in xargs if isinstance(xargs, dict) else ():
                if key.startswith(("span_", "cross_span_")):
                    return f"vllm_xargs.{key}"
        for key, value in body.items():
            if key in _FOREIGN_KEYS:
                continue
            if found := find_span(value, f"{path}.{key}" if path else key):
                return found
    elif isinstance(body, list):
        for index, value in enumerate(body):
            if found := find_span(value, f"{path}[{index}]"):
                return found
    return None


class RefuseSpans:
    """ASGI middleware that answers 400 to span markup on `REFUSING_PATHS`.

    Args:
        app: The next application.
        respond: Makes the ASGI response to an error; counts it.
    """

    def __init__(self, app: App, respond: Callable[[MarkupError], App]) -> None:
        self.app = app
        self.respond = respond

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"].removeprefix(scope.get("root_path", "")) not in REFUSING_PATHS
        ):
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        error = _look(b"".join(message.get("body", b"") for message in messages), scope["path"])
        if error is not None:
            await self.respond(error)(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, send)


def _look(body: bytes, path: str) -> MarkupError | None:
    if b"span" not in body:
        return None
    try:
        where = find_span(json.loads(body))
    except (ValueError, RecursionError):
        # Not for us to judge: vLLM answers what is wrong with it.
        return None
    if where is None:
        return None
    return MarkupError(
        f"spans are not supported on {path}; use /v1/chat/completions", where, "endpoint"
    )
