"""Prevents: a run that calls a document warm which the server does not keep, or that one bad document spoils.

The server here is a stand-in for one that evicts at once, or fails on some text: a real one does neither on demand.
tests/http/test_warm.py has a real one.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import httpx

from vllm_spans.warm.client import Model, Server
from vllm_spans.warm.corpus import Document, Unreadable
from vllm_spans.warm.forms import Form
from vllm_spans.warm.progress import Reporter, Tally
from vllm_spans.warm.runner import Runner, Settings

TOKENS = 64


class Kept:
    """A server's cache: the texts that it has computed, and those that it keeps.

    Args:
        keeps: Whether a computed text stays.
        fails: Whether a request with a text is answered with an error.
    """

    def __init__(
        self,
        keeps: Callable[[str], bool] = lambda text: True,
        fails: Callable[[str], bool] = lambda text: False,
    ) -> None:
        self.keeps, self.fails = keeps, fails
        self.cached: set[str] = set()
        self.requests: list[list[str]] = []

    def respond(self, request: httpx.Request) -> httpx.Response:
        texts = [document["text"] for document in json.loads(request.content)["documents"]]
        if request.url.path == "/v1/spans/explain":
            return httpx.Response(200, json=self.explain(texts))
        self.requests.append(texts)
        if any(map(self.fails, texts)):
            return httpx.Response(500, json={"error": {"message": "broken"}})
        self.cached.update(filter(self.keeps, texts))
        return httpx.Response(200, json={})

    def explain(self, texts: list[str]) -> dict[str, Any]:
        pieces = [
            {
                "kind": "plus",
                "tokens": TOKENS,
                "pads": 2,
                "cached_tokens": TOKENS * (t in self.cached),
            }
            for t in texts
        ]
        return {"pieces": pieces, "prompt_tokens": TOKENS * len(texts) + 40}


def warm(cache: Kept, *texts: str, **settings: Any) -> Tally:
    """Warm texts, up to three in a request."""
    documents: list[Document | Unreadable] = [Document(t, t, None, len(t)) for t in texts]
    tally = Tally(len(texts), sum(map(len, texts)))
    form = Form("documents", "m")
    given = Settings(**{"concurrency": 1, "batch_tokens": 3 * TOKENS, **settings})

    async def run() -> None:
        transport = httpx.MockTransport(cache.respond)
        async with Server("http://server", retries=0, transport=transport) as server:
            reporter = Reporter(io.StringIO(), rewrites=False)
            await Runner(server, Model("m", 4096), form, given, tally, reporter).run(
                iter(documents)
            )

    asyncio.run(run())
    assert tally.done == len(texts)
    assert tally.done_size == tally.size
    return tally


def test_what_the_server_does_not_keep_has_failed() -> None:
    tally = warm(Kept(keeps=lambda text: text != "b"), "a", "b", "c")
    assert (tally.computed, tally.tokens, tally.computed_tokens) == (2, 128, 128)
    ((name, reason),) = tally.failures
    assert name == "b"
    assert "64 of its 64 tokens are not cached" in reason
    assert "--concurrency" in reason


def test_a_document_that_breaks_its_request_is_found() -> None:
    cache = Kept(fails=lambda text: text == "b")
    tally = warm(cache, "a", "b", "c")
    assert tally.failures == [("b", "HTTP 500: broken")]
    assert (tally.computed, tally.requests) == (2, 2)
    assert {"a", "c"} <= cache.cached


def test_requests_are_filled_and_bounded() -> None:
    cache = Kept()
    texts = [f"text {index}" for index in range(7)]
    warm(cache, *texts)
    sizes = [len([text for text in sent if text in texts]) for sent in cache.requests]
    assert sizes == [3, 3, 1]


def test_equal_documents_are_sent_once() -> None:
    cache = Kept()
    tally = warm(cache, "a", "a", "b", concurrency=3)
    assert (tally.computed, tally.duplicates, tally.tokens) == (2, 1, 128)
    assert sorted(text for sent in cache.requests for text in sent if text in "ab") == ["a", "b"]
