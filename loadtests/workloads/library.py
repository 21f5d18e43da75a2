"""A library of documents with a popularity, as many workloads need it; pure."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from loadtests.fields import Fields, WorkloadError
from loadtests.prompts import Piece
from loadtests.texts import random_for, text

ORDERS = ("shuffled", "sorted")


@dataclass(frozen=True)
class Library:
    """Documents that requests share.

    Attributes:
        seed: Of its documents.
        name: Of the library; its documents differ from those of other names.
        count: How many documents.
        length: Least and greatest length in words.
        zipf: Exponent of the popularity: the n-th document is asked for in proportion to ``n ** -zipf``. 0: all alike.
        order: ``shuffled``: a new order in every request. ``sorted``: always the library's order, which suits a
            prefix cache best.
    """

    seed: int
    name: str
    count: int
    length: tuple[int, int]
    zipf: float
    order: str

    @classmethod
    def read(cls, fields: Fields, seed: int, name: str) -> Library:
        """From a table's keys ``count``, ``length``, ``zipf``, ``order`` and ``library_seed``."""
        return cls(
            # Workloads of other seeds can ask for the same documents: one fills the cache that another finds full.
            seed=fields.integer("library_seed", seed, low=0),
            name=name,
            count=fields.integer("count", low=1),
            length=fields.span("length"),
            zipf=fields.number("zipf", 1.0),
            order=fields.choice("order", ORDERS, "shuffled"),
        )

    def check(self, wanted: int, fields: Fields, key: str) -> None:
        """Refuse a request for more documents than there are.

        Raises:
            WorkloadError: There are too few.
        """
        if wanted > self.count:
            raise WorkloadError(
                f"{fields.name(key)} is up to {wanted}, but {fields.name('count')} is {self.count}; raise the count "
                "or ask for fewer"
            )

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - a library lives as long as its workload
    def document(self, number: int) -> Piece:
        """One document, a span."""
        words = random_for(self.seed, self.name, "length", number).randint(*self.length)
        return Piece(
            text(words, self.seed, self.name, number), is_span=True, title=f"{self.name} {number}"
        )

    def pick(self, rng: random.Random, wanted: int) -> list[int]:
        """Different documents by popularity, in the library's order of asking."""
        # The k greatest of log(u) / weight are a weighted sample without replacement (Efraimidis and Spirakis).
        weighed = [
            (math.log(1.0 - rng.random()) * (number + 1) ** self.zipf, number)
            for number in range(self.count)
        ]
        chosen = [number for _, number in sorted(weighed, reverse=True)[:wanted]]
        if self.order == "sorted":
            return sorted(chosen)
        rng.shuffle(chosen)
        return chosen
