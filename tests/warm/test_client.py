"""Prevents: a run that gives up too soon, never gives up, or does not say what to change.

The answers are those of a server in distress, which a healthy one does not give: tests/http/test_warm.py has a
real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from vllm_spans.warm import client
from vllm_spans.warm.client import Model, RefusedError, Server, ServerError

Answer = httpx.Response | httpx.TransportError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries, which are not waited for."""
    seen: list[float] = []

    async def sleep(seconds: float) -> None:
        seen.append(seconds)

    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    return seen


def error(status: int, message: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)


def ask(call: Callable[[Server], Any], *answers: Answer, retries: int = 3) -> tuple[Any, int]:
    """Result of a call, and how many requests it took."""
    sent: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        answer = answers[min(len(sent), len(answers)) - 1]
        if isinstance(answer, httpx.TransportError):
            raise answer
        return answer

    async def run() -> Any:
        transport = httpx.MockTransport(respond)
        async with Server(
            "http://server/v1/", api_key="key", retries=retries, transport=transport
        ) as server:
            return await call(server)

    result = asyncio.run(run())
    assert {str(request.url.copy_with(path="/")) for request in sent} == {"http://server/"}
    assert {request.headers["authorization"] for request in sent} == {"Bearer key"}
    return result, len(sent)


def complete(server: Server) -> Any:
    return server.complete({"model": "m"})


GOOD = httpx.Response(200, json={})


def test_overload_is_waited_out(pauses: list[float]) -> None:
    away = httpx.ConnectError("refused")
    _, sent = ask(complete, error(429, "busy", **{"Retry-After": "7"}), error(503, "x"), away, GOOD)
    assert sent == 4
    assert pauses[0] == 7
    assert 0.5 <= pauses[1] <= 1 <= pauses[2] <= 2


def test_overload_ends_as_a_failure_of_the_document(pauses: list[float]) -> None:
    with pytest.raises(RefusedError, match=r"HTTP 503: overloaded \(tried 4 times\)"):
        ask(complete, error(503, "overloaded"))
    assert len(pauses) == 3
    with pytest.raises(RefusedError, match="--timeout"):
        ask(complete, httpx.ReadTimeout("slow"))


def test_a_bad_request_is_not_tried_again(pauses: list[float]) -> None:
    with pytest.raises(RefusedError, match="HTTP 400: too long"):
        ask(complete, error(400, "too long"), GOOD)
    assert pauses == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (error(401, "Unauthorized"), "--api-key"),
        (error(404, "The model `x` does not exist."), "model `x`"),
        (httpx.Response(404), "VLLM_V1_SPANS_ENABLED"),
        (httpx.Response(200, text="<html>"), "does not answer as vLLM does"),
        (httpx.ConnectError("refused"), "no answer from http://server: refused. .*--url"),
        (httpx.RemoteProtocolError(""), "no answer from http://server: RemoteProtocolError"),
    ],
)
def test_what_no_document_can_pass_ends_the_run(
    pauses: list[float], answer: Answer, said: str
) -> None:
    with pytest.raises(ServerError, match=said):
        ask(complete, answer)


def test_models(pauses: list[float]) -> None:
    models = [{"id": "base", "max_model_len": 512}, {"id": "adapter", "max_model_len": None}]
    answer = httpx.Response(200, json={"data": models})
    found = [ask(lambda s, n=n: s.find_model(n), answer)[0] for n in (None, "adapter")]
    assert found == [Model("base", 512), Model("adapter", 512)]
    with pytest.raises(ServerError, match="does not serve other, but base, adapter"):
        ask(lambda server: server.find_model("other"), answer)
    # A wrong address is said at once.
    with pytest.raises(ServerError, match="no answer"):
        ask(lambda server: server.find_model(None), httpx.ConnectError("refused"))
    assert pauses == []


def piece(kind: str, cached: int | None, **tiers: int) -> dict[str, Any]:
    found = {"cached_tokens": cached, "tier_tokens": tiers}
    return {"kind": kind, "tokens": 64, "pads": 3, **found}


def test_explanations(pauses: list[float]) -> None:
    def answer(*pieces: dict[str, Any]) -> httpx.Response:
        body = {"pieces": pieces, "prompt_tokens": 99, "kv_bytes_per_token": 8}
        return httpx.Response(200, json=body)

    def explain(server: Server) -> Any:
        return server.explain({}, 2)

    pieces = [piece("prefix", 0), piece("plus", 64), piece("plus", 32), piece("cross", 0)]
    found, _ = ask(explain, answer(*pieces))
    assert [span.is_cached for span in found.spans] == [True, False]
    behind = [piece("plus", 0, cpu=32, file=32), piece("plus", 32, cpu=0, file=0)]
    first, second = ask(explain, answer(*behind))[0].spans
    assert first.is_cached and first.found == {"gpu": 0, "cpu": 32, "file": 32}
    assert not second.is_cached and second.missing_tokens == 32
    assert (found.prompt_tokens, found.kv_bytes_per_token) == (99, 8)
    assert found.kv_cache_tokens is None
    with pytest.raises(ServerError, match="--delimiter"):
        ask(explain, answer(piece("prefix", 0), piece("plus", 64)))
    with pytest.raises(ServerError, match="no engine"):
        ask(explain, answer(piece("plus", None), piece("plus", None)))
