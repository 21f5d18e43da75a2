"""SpanLayout: which token ranges of a prompt are spans.

The layout travels in ``SamplingParams.extra_args`` under the names that the span fork of vLLM uses in
``vllm_xargs``: ``span_starts`` and ``cross_span_starts``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPAN_STARTS = "span_starts"
CROSS_SPAN_STARTS = "cross_span_starts"
SPAN_PAD_TOKENS = "span_pad_tokens"
SPAN_GAP_POLICY = "span_gap_policy"
SPAN_GAP_LENGTH = "span_gap_length"
SPAN_ARGS = (SPAN_STARTS, CROSS_SPAN_STARTS, SPAN_PAD_TOKENS, SPAN_GAP_POLICY, SPAN_GAP_LENGTH)


class SpanLayoutError(ValueError):
    """A layout that cannot be served.

    Attributes:
        param: The part of the request that is at fault.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open token range ``[start, end)`` of a plus span, both ends multiples of the block size."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """The plus spans of one prompt; all other tokens are prefix (before the first span) or cross.

    Attributes:
        spans: Plus spans in order of position.
        cross_starts: Where a cross segment follows a plus span, in order.
    """

    spans: tuple[Span, ...]
    cross_starts: tuple[int, ...]

    @property
    def prefix_end(self) -> int:
        """Tokens in front of the first span."""
        return self.spans[0].start

    @classmethod
    def from_extra_args(
        cls, extra_args: Mapping[str, Any] | None, num_prompt_tokens: int, block_size: int
    ) -> SpanLayout | None:
        """Read the layout of a request.

        A plus span reaches to the next start of either kind or to the prompt's end. The block that holds the
        prompt's last token is computed in context in any case, so a span is cut in front of it.

        Args:
            extra_args: The request's ``SamplingParams.extra_args``.
            num_prompt_tokens: Tokens of the prompt, pads included.
            block_size: Tokens per KV block.

        Returns:
            The layout, or ``None`` when the request has no span.

        Raises:
            SpanLayoutError: Offsets that are no list of integers, not aligned, not increasing or out of range.
        """
        if not extra_args:
            return None
        plus = _offsets(extra_args, SPAN_STARTS, num_prompt_tokens, block_size)
        cross = _offsets(extra_args, CROSS_SPAN_STARTS, num_prompt_tokens, block_size)
        if not plus:
            if cross:
                raise SpanLayoutError(
                    f"{CROSS_SPAN_STARTS} is given without {SPAN_STARTS}; a cross segment follows a span",
                    CROSS_SPAN_STARTS,
                )
            return None
        both = set(plus).intersection(cross)
        if both:
            raise SpanLayoutError(
                f"offset {min(both)} is in {SPAN_STARTS} and in {CROSS_SPAN_STARTS}",
                CROSS_SPAN_STARTS,
            )
        if cross and cross[0] < plus[0]:
            raise SpanLayoutError(
                f"{CROSS_SPAN_STARTS}[0] = {cross[0]} lies before the first span at {plus[0]}; what precedes the "
                "first span is the prefix and needs no mark",
                CROSS_SPAN_STARTS,
            )
        last_block = (num_prompt_tokens - 1) // block_size * block_size
        borders = sorted([*plus, *cross, num_prompt_tokens])
        end_of = dict(itertools.pairwise(borders))
        spans = tuple(
            Span(start, min(end_of[start], last_block)) for start in plus if start < last_block
        )
        if not spans:
            return None
        return cls(spans, tuple(cross))


def _offsets(
    extra_args: Mapping[str, Any], name: str, num_prompt_tokens: int, block_size: int
) -> list[int]:
    values = extra_args.get(name)
    if values is None:
        return []
    if not isinstance(values, (list, tuple)) or any(type(value) is not int for value in values):
        raise SpanLayoutError(f"{name} must be a list of token offsets (integers)", name)
    previous = -1
    for index, value in enumerate(values):
        where = f"{name}[{index}] = {value}"
        if not 0 <= value < num_prompt_tokens:
            raise SpanLayoutError(
                f"{where} lies outside the prompt of {num_prompt_tokens} tokens", name
            )
        if value % block_size:
            raise SpanLayoutError(f"{where} is not a multiple of the block size {block_size}", name)
        if value <= previous:
            raise SpanLayoutError(f"{where} does not increase (before it stands {previous})", name)
        previous = value
    return list(values)
