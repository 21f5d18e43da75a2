"""Random prompts with spans, made from a pool of documents so that requests share them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

BLOCK = 32


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids of the tiny models."""
    return [rng.randrange(3, 2000) for _ in range(count)]


@dataclass
class Case:
    """A prompt and its layout."""

    tokens: list[int] = field(default_factory=list)
    span_starts: list[int] = field(default_factory=list)
    cross_span_starts: list[int] = field(default_factory=list)
    bodies: list[tuple[int, ...]] = field(default_factory=list)

    def prefix(self, text: list[int]) -> Case:
        """Add text before the first span."""
        assert not self.span_starts
        assert len(text) % BLOCK == 0
        self.tokens += text
        return self

    def span(self, text: list[int]) -> Case:
        """Add a plus span."""
        assert len(self.tokens) % BLOCK == 0
        self.span_starts.append(len(self.tokens))
        self.bodies.append(tuple(text))
        self.tokens += text
        return self

    def cross(self, text: list[int]) -> Case:
        """Add a cross segment."""
        assert len(self.tokens) % BLOCK == 0
        self.cross_span_starts.append(len(self.tokens))
        self.tokens += text
        return self

    @property
    def layout(self) -> dict[str, list[int]]:
        """The layout alone."""
        return {"span_starts": self.span_starts, "cross_span_starts": self.cross_span_starts}

    def request(
        self, policy: str | None = None, gap_length: int | None = None, **extra: Any
    ) -> dict[str, Any]:
        """The request in the worker's form.

        Args:
            policy: Gap policy override.
            gap_length: Gap length override.
            **extra: Further fields of the request.
        """
        return {
            "tokens": self.tokens,
            **self.layout,
            "span_gap_policy": policy,
            "span_gap_length": gap_length,
            **extra,
        }

    def plain(self, **extra: Any) -> dict[str, Any]:
        """The same tokens as an ordinary request."""
        return {"tokens": self.tokens, **extra}


def documents(rng: random.Random, count: int, blocks: tuple[int, int] = (1, 6)) -> list[list[int]]:
    """A pool of documents of whole blocks."""
    return [tokens(rng, BLOCK * rng.randint(*blocks)) for _ in range(count)]


def random_case(
    rng: random.Random, pool: list[list[int]], max_spans: int = 8, max_blocks: int = 40
) -> Case:
    """A random layout over documents of ``pool``.

    The prefix may be empty, spans are adjacent or have cross segments between them, one document
    may come twice, and the tail is marked or unmarked, short, longer than a block, or absent.
    """
    case = Case()
    if rng.random() < 0.7:
        case.prefix(tokens(rng, BLOCK * rng.randint(1, 3)))
    for _ in range(rng.randint(1, max_spans)):
        text = rng.choice(pool)
        if (len(case.tokens) + len(text)) // BLOCK > max_blocks - 6 and case.span_starts:
            break
        case.span(text)
        if rng.random() < 0.25:
            case.cross(tokens(rng, BLOCK * rng.randint(1, 2)))
    tail = rng.choice(["none", "none", "short", "short", "block", "long", "unmarked"])
    if tail == "none":
        return case
    text = tokens(
        rng, {"short": rng.randint(1, 31), "block": 32, "long": rng.randint(33, 90)}.get(tail, 20)
    )
    if tail == "unmarked":
        case.tokens += text
    else:
        # A cross segment may stand right after another one.
        case.cross(text)
    return case
