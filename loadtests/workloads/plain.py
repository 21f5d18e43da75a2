"""The control: requests without spans, which must not be slower on a server that knows spans; pure."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.fields import Fields
from loadtests.prompts import Message, Piece, Session, Turn
from loadtests.texts import random_for, text
from loadtests.workloads.shared_documents import system_prompt


@dataclass(frozen=True)
class Plain:
    """Sessions of one request each.

    Attributes:
        seed: The workload's.
        length: Least and greatest length of what the user says in words; every text is new.
        system_prompts: How many different system prompts there are.
        system_length: Their length in words.
        max_tokens: Least and greatest length of an answer.
    """

    seed: int
    length: tuple[int, int]
    system_prompts: int
    system_length: tuple[int, int]
    max_tokens: tuple[int, int]

    @classmethod
    def read(cls, fields: Fields, seed: int, max_tokens: tuple[int, int]) -> Plain:
        """From the workload's table."""
        return cls(
            seed=seed,
            length=fields.span("length"),
            system_prompts=fields.integer("system_prompts", 1, low=1),
            system_length=fields.span("system_length", (40, 40)),
            max_tokens=max_tokens,
        )

    def size(self) -> int | None:
        """It has no end."""
        return None

    def session(self, number: int) -> Session:
        """One request."""
        rng = random_for(self.seed, "plain", number)
        system = system_prompt(self.seed, rng.randrange(self.system_prompts), self.system_length)
        words = text(rng.randint(*self.length), self.seed, "plain", number)
        turn = Turn((system, Message("user", (Piece(words),))), rng.randint(*self.max_tokens))
        return Session(number, (turn,))
