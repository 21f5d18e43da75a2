"""Questions over passages, asked again and again with the passages in a new order; pure but for reading the file.

The file is a list of ``{"question": ..., "ctxs": [{"title": ..., "text": ...}, ...]}``, as the multi-document sets of
the retrieval literature come (MuSiQue among them).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.fields import Fields, WorkloadError
from loadtests.prompts import Message, Piece, Session, Turn
from loadtests.texts import random_for
from loadtests.workloads.library import ORDERS
from loadtests.workloads.shared_documents import system_prompt
from loadtests.workloads.trace import read_lines


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its passages."""

    text: str
    passages: tuple[Piece, ...]


@dataclass(frozen=True)
class Questions:
    """Sessions of one request each.

    Attributes:
        seed: The workload's.
        questions: What is asked.
        repeats: How often each is asked; the rounds follow each other, each in a new order.
        order: Order of the passages: ``shuffled`` or ``sorted`` (as in the file).
        system_length: Length of the one system prompt in words.
        max_tokens: Least and greatest length of an answer.
    """

    seed: int
    questions: tuple[Question, ...]
    repeats: int
    order: str
    system_length: tuple[int, int]
    max_tokens: tuple[int, int]

    @classmethod
    def read(
        cls, fields: Fields, seed: int, max_tokens: tuple[int, int], data: Path | None
    ) -> Questions:
        """From the workload's table and the questions' file."""
        limit = fields.integer("questions", 1_000_000, low=1)
        passages = fields.integer("passages", 1_000_000, low=1)
        questions = parse("\n".join(read_lines(data, fields)), str(data))[:limit]
        return cls(
            seed=seed,
            questions=tuple(Question(q.text, q.passages[:passages]) for q in questions),
            repeats=fields.integer("repeats", 2, low=1),
            order=fields.choice("order", ORDERS, "shuffled"),
            system_length=fields.span("system_length", (20, 20)),
            max_tokens=max_tokens,
        )

    def size(self) -> int | None:
        """Every question as often as it is repeated."""
        return len(self.questions) * self.repeats

    def session(self, number: int) -> Session:
        """One question."""
        round_number, place = divmod(number, len(self.questions))
        order = list(range(len(self.questions)))
        random_for(self.seed, "round", round_number).shuffle(order)
        question = self.questions[order[place]]
        rng = random_for(self.seed, "questions", number)
        passages = list(question.passages)
        if self.order == "shuffled":
            rng.shuffle(passages)
        messages = (
            system_prompt(self.seed, 0, self.system_length),
            Message("user", (*passages, Piece(question.text))),
        )
        return Session(number, (Turn(messages, rng.randint(*self.max_tokens)),))


def parse(text: str, name: str) -> list[Question]:
    """Read a file of questions.

    Raises:
        WorkloadError: It is not in the format; the entry is named.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise WorkloadError(f"{name} is no JSON ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"{name} holds no list of questions")
    found = []
    for number, entry in enumerate(entries):
        try:
            passages = tuple(_passage(passage) for passage in entry["ctxs"])
            question = entry["question"]
            if not passages or not isinstance(question, str) or not question.strip():
                raise ValueError("no passage or no question")
        except (KeyError, TypeError, ValueError) as error:
            raise WorkloadError(
                f"{name}: entry {number} is no question ({type(error).__name__} {error}); it must have a question and "
                "ctxs, each with a text"
            ) from error
        found.append(Question(question, passages))
    return found


def _passage(found: dict[str, Any]) -> Piece:
    title, text = found.get("title"), found["text"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("an empty passage")
    if title is not None and not isinstance(title, str):
        raise ValueError("a title that is no text")
    return Piece(text, is_span=True, title=title or None)
