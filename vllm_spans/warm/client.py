"""What a run asks of the server, with retries, and what its refusals mean."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from vllm_spans.markup.explain_cli import PATH as EXPLAIN_PATH
from vllm_spans.markup.explain_cli import base_url, no_answer, refusal

_CHAT_PATH = "/v1/chat/completions"
_MODELS_PATH = "/v1/models"
# Answers that another try may turn into better ones: overload, restarts, gateways on the way.
_RETRIED = (408, 429, 500, 502, 503, 504)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class ServerError(Exception):
    """The run cannot go on; the text says why and what to change."""


class RefusedError(Exception):
    """The server refused one request; the text says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the server serves.

    Attributes:
        name: Its name in requests.
        max_tokens: Tokens of its context, ``None`` if the server does not say.
    """

    name: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class SpanState:
    """A span as the server sees it.

    Attributes:
        tokens: Its tokens.
        pads: Pads among them.
        found: How many of them are in the KV cache (``gpu``), in the server's CPU memory and in its files, each
            counted where it is nearest.
    """

    tokens: int
    pads: int
    found: Mapping[str, int]

    @property
    def missing_tokens(self) -> int:
        """Tokens that would have to be computed."""
        return self.tokens - sum(self.found.values())

    @property
    def is_cached(self) -> bool:
        """Whether all of the span is there."""
        return not self.missing_tokens


@dataclass(frozen=True, slots=True)
class Explanation:
    """The server's view of a request.

    Attributes:
        spans: Its spans in order.
        prompt_tokens: Tokens of its prompt.
        kv_bytes_per_token: Bytes of KV per token.
        kv_cache_tokens: Tokens that the KV cache holds.
    """

    spans: tuple[SpanState, ...]
    prompt_tokens: int
    kv_bytes_per_token: int | None
    kv_cache_tokens: int | None


class Server:
    """A running server; used as an asynchronous context.

    Args:
        url: Its address, with or without ``/v1``.
        api_key: Its key.
        timeout: Seconds to wait for an answer.
        retries: Further tries after a failure that may pass.
        transport: How requests are sent; by network when left out.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = base_url(url)
        self._retries = retries
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
                limits=httpx.Limits(max_connections=None),
                transport=transport,
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ServerError(f"{url} is no address of a server: {error}") from error

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def find_model(self, name: str | None) -> Model:
        """Find a model.

        Args:
            name: Its name; the server's first model when left out.

        Raises:
            ServerError: The server does not answer, or does not serve it.
        """
        try:
            answer = await self._send("GET", _MODELS_PATH, None, retries=0)
        except RefusedError as error:
            raise ServerError(f"{self.url}: {error}") from error
        models = answer.get("data") or []
        names = [str(model["id"]) for model in models]
        if not names:
            raise ServerError(f"{self.url} serves no model")
        if name is None:
            name = names[0]
        elif name not in names:
            raise ServerError(
                f"{self.url} does not serve {name}, but {', '.join(names)}; choose with --model"
            )
        limits = [model["max_model_len"] for model in models if model.get("max_model_len")]
        # An adapter has its base model's context.
        return Model(name, min(limits, default=None))

    async def explain(self, body: dict[str, Any], spans: int) -> Explanation:
        """Ask how a request is cut and what of it is cached.

        Args:
            body: Its body.
            spans: Least number of spans that it must have.

        Raises:
            RefusedError: The request cannot be served.
            ServerError: The server cannot be used for this.
        """
        answer = await self._send("POST", EXPLAIN_PATH, body, retries=self._retries)
        found = [piece for piece in answer["pieces"] if piece["kind"] == "plus"]
        if len(found) < spans:
            raise ServerError(
                f"the server finds {len(found)} spans in a request with {spans}. For --form text it must be "
                "started with the same --delimiter; else another form may suit its chat template"
            )
        if any(piece["cached_tokens"] is None for piece in found):
            raise ServerError(
                "the server has no engine and so no KV cache; warm one that generates"
            )
        states = [
            SpanState(
                piece["tokens"],
                piece["pads"],
                {"gpu": piece["cached_tokens"], **(piece.get("tier_tokens") or {})},
            )
            for piece in found
        ]
        return Explanation(
            tuple(states),
            answer["prompt_tokens"],
            answer.get("kv_bytes_per_token"),
            answer.get("kv_cache_tokens"),
        )

    async def complete(self, body: dict[str, Any]) -> None:
        """Send a chat completion.

        Args:
            body: Its body.

        Raises:
            RefusedError: The request cannot be served.
            ServerError: The server cannot be used for this.
        """
        await self._send("POST", _CHAT_PATH, body, retries=self._retries)

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, retries: int
    ) -> dict[str, Any]:
        for attempt in range(retries + 1):
            is_last = attempt == retries
            pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            try:
                response = await self._client.request(method, path, json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
                if is_last:
                    raise RefusedError(
                        "no answer in time; give it longer with --timeout"
                    ) from error
            except httpx.TransportError as error:
                if is_last:
                    reason = str(error) or type(error).__name__
                    raise ServerError(no_answer(self.url, reason)) from error
            else:
                if response.status_code not in _RETRIED or is_last:
                    return _read(response, attempt)
                pause = max(pause, _asked_pause(response))
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _read(response: httpx.Response, attempt: int) -> dict[str, Any]:
    status = response.status_code
    if response.is_success:
        try:
            return dict(response.json())
        except (ValueError, TypeError) as error:
            raise ServerError(f"{response.url} does not answer as vLLM does") from error
    text = refusal(status, response.content, response.reason_phrase)
    if status in (401, 403):
        raise ServerError(f"{text}. Give the server's key with --api-key or OPENAI_API_KEY")
    if status == 404 or response.is_redirect:
        raise ServerError(text)
    tries = f" (tried {attempt + 1} times)" if attempt else ""
    raise RefusedError(text + tries)


def _asked_pause(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; a date in place of seconds is not heeded."""
    try:
        return min(float(response.headers["retry-after"]), _LONGEST_PAUSE)
    except (KeyError, ValueError):
        return 0.0
