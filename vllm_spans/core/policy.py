"""Gap policies: which tokens of a reused span are recomputed in the request's context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from vllm_spans.core.layout import Span

GapPolicyName = Literal["none", "legolink", "full"]
GAP_POLICIES: tuple[str, ...] = get_args(GapPolicyName)


@dataclass(frozen=True, slots=True)
class GapPolicy:
    """A gap policy with its parameter.

    Attributes:
        name: ``none`` recomputes nothing. ``legolink`` recomputes the first ``gap_length`` tokens of each span
            (the LegoLink variant of EPIC, Hu et al. 2024). ``full`` recomputes everything, that is, the request
            is an ordinary one: the oracle.
        gap_length: k of ``legolink`` in tokens, a multiple of the block size; 0 for the other two.
    """

    name: str
    gap_length: int = 0

    @property
    def is_full(self) -> bool:
        """Whether spans are not reused at all."""
        return self.name == "full"

    def gaps(self, span: Span) -> tuple[tuple[int, int], ...]:
        """Token ranges of a span to recompute in context.

        Args:
            span: Token range of the span in the prompt.

        Returns:
            Half-open, disjoint, increasing, block-aligned ranges inside the span. A span at offset 0 has none:
            nothing stands before it, so its isolated KV is its contextual KV.
        """
        if self.name != "legolink" or span.start == 0:
            return ()
        return ((span.start, min(span.start + self.gap_length, span.end)),)


def make_policy(name: str, gap_length: int) -> GapPolicy:
    """Build a policy, dropping the parameter where it has no meaning.

    Args:
        name: One of ``GAP_POLICIES``.
        gap_length: k in tokens.

    Raises:
        ValueError: Unknown name.
    """
    if name not in GAP_POLICIES:
        raise ValueError(f"unknown gap policy {name!r}; use one of {', '.join(GAP_POLICIES)}")
    return GapPolicy(name, gap_length if name == "legolink" else 0)
