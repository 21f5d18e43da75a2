"""Forms 4 and 5: prompts that come as token ids, laid out by the client; pure.

Nothing is padded or moved here: the client has put its spans on block starts itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_spans.core.layout import (
    CROSS_SPAN_STARTS,
    SPAN_PAD_TOKENS,
    SPAN_STARTS,
    SpanLayout,
    SpanLayoutError,
)
from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.pieces import LaidPiece, MarkedPrompt, PieceKind


def has_offsets(xargs: Mapping[str, Any] | None) -> bool:
    """Whether ``vllm_xargs`` lays spans out (an empty list of starts does not)."""
    return bool(xargs) and any(
        xargs.get(key) not in (None, [])  # type: ignore[union-attr]
        for key in (SPAN_STARTS, CROSS_SPAN_STARTS)
    )


def from_offsets(
    token_ids: Sequence[int],
    xargs: Mapping[str, Any],
    *,
    block_size: int,
    max_spans: int,
    where: str = "vllm_xargs",
) -> MarkedPrompt:
    """Form 4: spans at the offsets that the client gives.

    Args:
        token_ids: The prompt.
        xargs: Holds ``span_starts`` and, where wanted, ``cross_span_starts`` and ``span_pad_tokens``.
        block_size: Tokens per KV block.
        max_spans: Most spans allowed.
        where: The part of the request that ``xargs`` is.

    Raises:
        MarkupError: Offsets not aligned, not increasing, out of range or too many.
    """
    try:
        SpanLayout.from_extra_args(xargs, len(token_ids), block_size)
    except SpanLayoutError as error:
        raise MarkupError(str(error), f"{where}.{error.param}", "offsets") from error
    starts = xargs.get(SPAN_STARTS) or []
    pads = xargs.get(SPAN_PAD_TOKENS, 0)
    if type(pads) is not int or not 0 <= pads <= len(token_ids):
        raise MarkupError(
            f"{SPAN_PAD_TOKENS} must be the number of pads in the prompt, not {pads!r}",
            f"{where}.{SPAN_PAD_TOKENS}",
            "offsets",
        )
    _check_count(len(starts), max_spans, f"{where}.{SPAN_STARTS}")
    return _laid_out(token_ids, starts, xargs.get(CROSS_SPAN_STARTS) or [], pads)


def from_markers(
    token_ids: Sequence[int],
    *,
    token_plus: int,
    token_cross: int | None,
    block_size: int,
    max_spans: int,
    param: str = "prompt",
) -> MarkedPrompt | None:
    """Form 5: marker tokens at block starts.

    The markers stay in the prompt as the first token of what they begin. A marker inside a block and
    a cross marker before the first span are ordinary text.

    Args:
        token_ids: The prompt.
        token_plus: Begins a span.
        token_cross: Begins a cross segment.
        block_size: Tokens per KV block.
        max_spans: Most spans allowed.
        param: The part of the request that the prompt is.

    Returns:
        The prompt, or ``None`` when it has no marker at a block start.

    Raises:
        MarkupError: Too many spans.
    """
    plus: list[int] = []
    cross: list[int] = []
    in_span = False
    for start in range(0, len(token_ids), block_size):
        token = token_ids[start]
        if token == token_plus:
            plus.append(start)
            in_span = True
        elif in_span and token == token_cross:
            cross.append(start)
            in_span = False
    if not plus:
        return None
    _check_count(len(plus), max_spans, param)
    return _laid_out(token_ids, plus, cross, 0)


def _check_count(count: int, max_spans: int, param: str) -> None:
    if count > max_spans:
        raise MarkupError(
            f"{count} spans are more than the {max_spans} that this server allows "
            "(VLLM_V1_SPANS_MAX_SPANS)",
            param,
            "too_many_spans",
        )


def _laid_out(
    token_ids: Sequence[int], plus: Sequence[int], cross: Sequence[int], pads: int
) -> MarkedPrompt:
    kinds: dict[int, PieceKind] = {0: "prefix"} if token_ids else {}
    kinds.update(dict.fromkeys(plus, "plus"))
    kinds.update(dict.fromkeys(cross, "cross"))
    borders = [*sorted(kinds), len(token_ids)]
    pieces = tuple(
        LaidPiece(kinds[start], start, end, 0) for start, end in itertools.pairwise(borders)
    )
    return MarkedPrompt(list(token_ids), pieces, None, pads)
