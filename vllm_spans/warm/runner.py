"""Warming a corpus: look each document up, compute those that are not cached, check that they then are."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_spans.warm.batches import Batcher, Pending
from vllm_spans.warm.client import (
    Explanation,
    Model,
    RefusedError,
    Server,
    ServerError,
    SpanState,
)
from vllm_spans.warm.corpus import Document, Unreadable
from vllm_spans.warm.forms import Form
from vllm_spans.warm.progress import Reporter, Tally


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run.

    Attributes:
        concurrency: Requests at a time.
        batch_tokens: Most span tokens of a request with several documents.
        force: Send what is cached too.
        check: Send nothing, only look up.
    """

    concurrency: int
    batch_tokens: int
    force: bool = False
    check: bool = False


class Runner:
    """One run over a corpus.

    Args:
        server: The server.
        model: The model that documents are warmed for.
        form: How requests hold documents.
        settings: How to run.
        tally: Counts, filled in.
        reporter: Told of failures and progress.
    """

    def __init__(
        self,
        server: Server,
        model: Model,
        form: Form,
        settings: Settings,
        tally: Tally,
        reporter: Reporter,
    ) -> None:
        self._server = server
        self._model = model
        self._form = form
        self._settings = settings
        self._tally = tally
        self._reporter = reporter
        self._seen: set[bytes] = set()
        self._started = time.monotonic()

    async def run(self, documents: Iterator[Document | Unreadable]) -> None:
        """Warm all documents.

        Args:
            documents: Read as the run comes to them.

        Raises:
            ServerError: The run cannot go on.
        """
        ticker = asyncio.create_task(self._tick())
        stopped_by: Exception | None = None
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._settings.concurrency):
                    workers.create_task(self._work(documents))
        except* ServerError as group:
            stopped_by = group.exceptions[0]
        finally:
            ticker.cancel()
            self._set_time()
        if stopped_by is not None:
            raise stopped_by

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._reporter.interval)
            self._set_time()
            self._reporter.progress(self._tally)

    def _set_time(self) -> None:
        self._tally.seconds = time.monotonic() - self._started

    async def _work(self, documents: Iterator[Document | Unreadable]) -> None:
        """Take documents from the common iterator until it ends; one request at a time."""
        batcher = Batcher(self._settings.batch_tokens, self._model.max_tokens, self._form.can_share)
        for document in documents:
            pending = await self._look_up(document)
            if pending is not None and (batch := batcher.add(pending)):
                await self._compute(batch)
        for batch in batcher.flush():
            await self._compute(batch)

    async def _look_up(self, document: Document | Unreadable) -> Pending | None:
        """Ask the server for a document; it comes back if there is something to compute."""
        if isinstance(document, Unreadable):
            self._fail(document, document.reason)
            return None
        digest = _digest(document)
        if digest in self._seen:
            self._tally.duplicates += 1
            self._tally.done_size += document.size
            return None
        self._seen.add(digest)
        if problem := self._form.problem(document):
            self._fail(document, problem)
            return None
        try:
            found = await self._explain([document])
        except RefusedError as error:
            self._fail(document, str(error))
            return None
        span = found.spans[0]
        if span.is_cached and not self._settings.force:
            self._tally.cached += 1
        elif self._settings.check:
            self._tally.missing += 1
        else:
            overhead = found.prompt_tokens - span.tokens
            return Pending(document, span.tokens, span.found, overhead)
        self._count(document, span, span.found)
        return None

    async def _compute(self, batch: Sequence[Pending]) -> None:
        """Let the server compute documents in one request, or each in its own if it refuses that."""
        documents = [pending.document for pending in batch]
        try:
            await self._server.complete(self._form.body(documents))
            found = await self._explain(documents)
        except RefusedError as error:
            if len(batch) == 1:
                self._fail(documents[0], str(error))
                return
            for pending in batch:
                await self._compute([pending])
            return
        self._tally.requests += 1
        # A companion's span comes behind those of the documents.
        for pending, span in zip(batch, found.spans, strict=False):
            if not span.is_cached:
                self._fail(
                    pending.document,
                    f"was computed, but {span.missing_tokens} of its {span.tokens} tokens are not "
                    "cached: the KV cache is too small for what runs at a time (lower --concurrency), "
                    "or prefix caching is off",
                )
                continue
            if sum(pending.found.values()) == pending.tokens:
                self._tally.cached += 1
            else:
                self._tally.computed += 1
            self._count(pending.document, span, pending.found)

    async def _explain(self, documents: Sequence[Document]) -> Explanation:
        found = await self._server.explain(self._form.body(documents), len(documents))
        self._tally.kv_bytes_per_token = found.kv_bytes_per_token
        self._tally.kv_cache_tokens = found.kv_cache_tokens
        return found

    def _count(self, document: Document, span: SpanState, found: Mapping[str, int]) -> None:
        """Count a document that did not fail, of whose span so much was there before."""
        self._tally.done_size += document.size
        self._tally.tokens += span.tokens
        self._tally.pads += span.pads
        self._tally.found_tokens.update(found)
        if not self._settings.check:
            self._tally.computed_tokens += span.tokens - sum(found.values())

    def _fail(self, document: Document | Unreadable, reason: str) -> None:
        self._tally.failures.append((document.name, reason))
        self._tally.done_size += document.size
        self._reporter.failure(document.name, reason)


def _digest(document: Document) -> bytes:
    title = "" if document.title is None else f"{len(document.title)}:{document.title}"
    return hashlib.blake2b(f"{title}\0{document.text}".encode(), digest_size=16).digest()
