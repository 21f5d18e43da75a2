"""A chat of several turns, with documents that come up on the way; pure."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.fields import Fields
from loadtests.prompts import Message, Piece, Session, Turn
from loadtests.texts import random_for, text
from loadtests.workloads.library import Library
from loadtests.workloads.shared_documents import system_prompt


@dataclass(frozen=True)
class Conversation:
    """Sessions of several requests; each holds all that was said before.

    Attributes:
        seed: The workload's.
        library: Documents that users bring in.
        turns: Least and greatest number of turns.
        per_turn: Documents that a turn brings in; none twice in a session.
        system_length: Length of the one system prompt in words.
        question_length: Length of what a user says in words.
        think_seconds: Mean of the exponential time a user takes between an answer and the next turn.
        max_tokens: Least and greatest length of an answer; what the assistant said is scripted at that length.
    """

    seed: int
    library: Library
    turns: tuple[int, int]
    per_turn: tuple[int, int]
    system_length: tuple[int, int]
    question_length: tuple[int, int]
    think_seconds: float
    max_tokens: tuple[int, int]

    @classmethod
    def read(cls, fields: Fields, seed: int, max_tokens: tuple[int, int]) -> Conversation:
        """From the workload's table."""
        library = Library.read(fields, seed, "attachment")
        turns = fields.span("turns")
        per_turn = fields.span("per_turn", (0, 1), low=0)
        library.check(turns[1] * per_turn[1], fields, "turns x per_turn")
        return cls(
            seed=seed,
            library=library,
            turns=turns,
            per_turn=per_turn,
            system_length=fields.span("system_length", (40, 40)),
            question_length=fields.span("question_length", (12, 12)),
            think_seconds=fields.number("think_seconds", 0.0),
            max_tokens=max_tokens,
        )

    def size(self) -> int | None:
        """It has no end."""
        return None

    def session(self, number: int) -> Session:
        """One conversation."""
        rng = random_for(self.seed, "conversation", number)
        count = rng.randint(*self.turns)
        wanted = [rng.randint(*self.per_turn) for _ in range(count)]
        documents = iter(self.library.pick(rng, sum(wanted)))
        said = [system_prompt(self.seed, 0, self.system_length)]
        turns = []
        for index in range(count):
            words = rng.randint(*self.question_length)
            question = Piece(f"\n{text(words, self.seed, 'turn', number, index)} ?")
            brought = [self.library.document(next(documents)) for _ in range(wanted[index])]
            said.append(Message("user", (*brought, question)))
            tokens = rng.randint(*self.max_tokens)
            pause = rng.expovariate(1.0) * self.think_seconds if index else 0.0
            turns.append(Turn(tuple(said), tokens, pause))
            answer = text(tokens, self.seed, "answer", number, index)
            said.append(Message("assistant", (Piece(answer),)))
        return Session(number, tuple(turns))
