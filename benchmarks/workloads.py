"""Prompts for the benchmarks: documents of random tokens in random orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

Request = dict[str, Any]


class Corpus:
    """Makes documents and prompts; times do not depend on what the tokens say.

    Args:
        seed: Of everything that is random.
        vocabulary: Token ids are below this.
        question: Tokens after the last document.
    """

    def __init__(self, seed: int | str, vocabulary: int, question: int = 64) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._question = question

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self._random.randrange(100, self._vocabulary) for _ in range(count)]

    def documents(self, count: int, length: int) -> list[list[int]]:
        """Fresh documents."""
        return [self.tokens(length) for _ in range(count)]

    def shuffled(
        self, documents: Sequence[list[int]], prefix: Sequence[int] = (), **extra: Any
    ) -> Request:
        """A request over documents in a random order that does not begin as they stand, with a new question.

        Args:
            documents: Each becomes a plus span.
            prefix: Tokens in front of them.
            **extra: Further entries of ``extra_args``.
        """
        order = list(documents)
        self._random.shuffle(order)
        if len(order) > 1 and order[0] == documents[0]:
            order.append(order.pop(0))
        return self.request(order, prefix, **extra)

    def request(
        self, documents: Sequence[list[int]], prefix: Sequence[int] = (), **extra: Any
    ) -> Request:
        """A request over documents as they stand, with a new question."""
        tokens, starts = list(prefix), []
        for document in documents:
            starts.append(len(tokens))
            tokens += document
        layout = {"span_starts": starts, "cross_span_starts": [len(tokens)], **extra}
        return {"tokens": tokens + self.tokens(self._question), "extra_args": layout}

    def other_question(self, request: Request) -> Request:
        """The same documents in the same order, with a new question and without marks."""
        return {
            "tokens": request["tokens"][: -self._question] + self.tokens(self._question),
        }


def unmarked(request: Request) -> Request:
    """The same tokens as an ordinary request."""
    return {name: value for name, value in request.items() if name != "extra_args"}


def zipf_requests(
    requests: int, documents: int, per_request: int, length: int, prefix: int, vocabulary: int
) -> list[Request]:
    """A shared-document workload: each request takes documents by Zipf popularity, in random order.

    Args:
        requests: How many.
        documents: In the pool; the document of rank r is drawn with a weight of 1 / r.
        per_request: Documents of a request, all different.
        length: Tokens of a document.
        prefix: Tokens in front, the same in every request.
        vocabulary: Token ids are below this.
    """
    corpus, rng = Corpus("zipf", vocabulary), random.Random("zipf")
    pool, head = corpus.documents(documents, length), corpus.tokens(prefix)
    weights = [1 / rank for rank in range(1, documents + 1)]
    made = []
    for _ in range(requests):
        chosen: list[int] = []
        while len(chosen) < per_request:
            (index,) = rng.choices(range(documents), weights)
            if index not in chosen:
                chosen.append(index)
        made.append(corpus.request([pool[index] for index in chosen], head))
    return made
