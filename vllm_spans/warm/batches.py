"""Which documents share a request; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_spans.warm.corpus import Document


@dataclass(frozen=True, slots=True)
class Pending:
    """A document that is not cached, or only in part.

    Attributes:
        document: The document.
        tokens: Tokens of its span, pads included.
        found: Those of them that were there already, by place.
        overhead: Tokens of its request outside its span.
    """

    document: Document
    tokens: int
    found: Mapping[str, int]
    overhead: int


class Batcher:
    """Gathers documents into requests.

    Args:
        token_limit: Most span tokens of a request with several documents.
        prompt_limit: Most tokens of a prompt; ``None`` if unknown.
        can_share: Whether two documents may be in one request.
    """

    def __init__(
        self,
        token_limit: int,
        prompt_limit: int | None,
        can_share: Callable[[Document, Document], bool],
    ) -> None:
        self._token_limit = token_limit
        self._prompt_limit = prompt_limit
        self._can_share = can_share
        self._open: list[list[Pending]] = []

    def add(self, new: Pending) -> list[Pending]:
        """Add a document.

        Returns:
            Documents of a request that is complete; none when there is no such yet.
        """
        for batch in self._open:
            if not self._can_share(batch[0].document, new.document):
                continue
            if self._fits([*batch, new]):
                batch.append(new)
                return []
            self._open.remove(batch)
            self._open.append([new])
            return batch
        self._open.append([new])
        return []

    def flush(self) -> list[list[Pending]]:
        """What is left, request by request."""
        left, self._open = self._open, []
        return left

    def _fits(self, batch: list[Pending]) -> bool:
        tokens = sum(pending.tokens for pending in batch)
        if tokens > self._token_limit:
            return False
        overhead = max(pending.overhead for pending in batch)
        # One token is generated.
        return self._prompt_limit is None or tokens + overhead + 1 <= self._prompt_limit
