"""Retrieval: each request asks about some documents of a shared library; pure."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.fields import Fields
from loadtests.prompts import Message, Piece, Session, Turn
from loadtests.texts import random_for, text
from loadtests.workloads.library import Library


@dataclass(frozen=True)
class SharedDocuments:
    """Sessions of one request each.

    Attributes:
        seed: The workload's.
        library: Its documents.
        per_request: Least and greatest number of documents of a request.
        system_prompts: How many different system prompts there are.
        system_length: Their length in words.
        question_length: Length of a question in words; every question is new.
        max_tokens: Least and greatest length of an answer.
    """

    seed: int
    library: Library
    per_request: tuple[int, int]
    system_prompts: int
    system_length: tuple[int, int]
    question_length: tuple[int, int]
    max_tokens: tuple[int, int]

    @classmethod
    def read(cls, fields: Fields, seed: int, max_tokens: tuple[int, int]) -> SharedDocuments:
        """From the workload's table."""
        library = Library.read(fields, seed, "document")
        per_request = fields.span("per_request")
        library.check(per_request[1], fields, "per_request")
        return cls(
            seed=seed,
            library=library,
            per_request=per_request,
            system_prompts=fields.integer("system_prompts", 1, low=1),
            system_length=fields.span("system_length", (40, 40)),
            question_length=fields.span("question_length", (12, 12)),
            max_tokens=max_tokens,
        )

    def size(self) -> int | None:
        """It has no end."""
        return None

    def session(self, number: int) -> Session:
        """One request."""
        rng = random_for(self.seed, "shared_documents", number)
        chosen = self.library.pick(rng, rng.randint(*self.per_request))
        question = text(rng.randint(*self.question_length), self.seed, "question", number)
        pieces = [self.library.document(one) for one in chosen] + [Piece(f"\n{question} ?")]
        system = system_prompt(self.seed, rng.randrange(self.system_prompts), self.system_length)
        turn = Turn((system, Message("user", tuple(pieces))), rng.randint(*self.max_tokens))
        return Session(number, (turn,))


def system_prompt(seed: int, number: int, length: tuple[int, int]) -> Message:
    """The system message of a number, the same in every session that has it."""
    words = random_for(seed, "system_length", number).randint(*length)
    return Message("system", (Piece(text(words, seed, "system", number)),))
