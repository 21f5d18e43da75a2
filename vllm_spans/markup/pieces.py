"""From pieces of text to prompt tokens and span layout; pure, no vLLM objects.

A prompt is a row of pieces: *prefix* (before the first span), *plus* (a span) and *cross* (text after
a span). Each piece is tokenised on its own, so that a span has the same tokens wherever it stands, and
every piece that another one follows is filled up to the block size, so that the next one starts on a
block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_spans.core.layout import CROSS_SPAN_STARTS, SPAN_PAD_TOKENS, SPAN_STARTS
from vllm_spans.markup.errors import MarkupError

PieceKind = Literal["prefix", "plus", "cross"]
EncodeBatch = Callable[[list[str]], list[list[int]]]
"""Tokens of each text without special tokens at its ends; the first text opens the prompt."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of the prompt's text.

    Attributes:
        text: The text.
        is_span: Whether the text is a plus span.
        param: The part of the request that a span comes from; names it in errors.
    """

    text: str
    is_span: bool
    param: str = "prompt"


@dataclass(frozen=True, slots=True)
class LaidPiece:
    """A piece with its place in the prompt: tokens ``[start, end)``, the last ``pads`` of them pads."""

    kind: PieceKind
    start: int
    end: int
    pads: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """Prompt tokens with their layout.

    Attributes:
        token_ids: Tokens of the prompt, pads included.
        pieces: Pieces in order; they cover the prompt.
        text: The prompt's text without pads, where it is known.
        pad_tokens: Pads in the prompt; the sum over the pieces, or what a client that laid out the
            prompt itself reported.
    """

    token_ids: list[int]
    pieces: tuple[LaidPiece, ...]
    text: str | None
    pad_tokens: int

    @property
    def span_starts(self) -> list[int]:
        """Start of every plus span."""
        return [piece.start for piece in self.pieces if piece.kind == "plus"]

    @property
    def cross_span_starts(self) -> list[int]:
        """Start of every cross segment."""
        return [piece.start for piece in self.pieces if piece.kind == "cross"]

    def extra_args(self) -> dict[str, Any]:
        """The layout as ``SamplingParams.extra_args`` carries it."""
        return {
            SPAN_STARTS: self.span_starts,
            CROSS_SPAN_STARTS: self.cross_span_starts,
            SPAN_PAD_TOKENS: self.pad_tokens,
        }

    def tokens_without_pads(self) -> list[int]:
        """Prompt tokens less the pads: what the plain rendering's text decodes from."""
        tokens: list[int] = []
        for piece in self.pieces:
            tokens += self.token_ids[piece.start : piece.end - piece.pads]
        return tokens


def merge_ordinary(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Join neighbouring ordinary pieces and drop empty ones, so that no segment starts without need."""
    merged: list[TextPiece] = []
    for piece in pieces:
        if piece.is_span:
            merged.append(piece)
        elif piece.text:
            if merged and not merged[-1].is_span:
                merged[-1] = TextPiece(merged[-1].text + piece.text, False)
            else:
                merged.append(piece)
    return merged


def assemble(
    pieces: Sequence[TextPiece],
    encode: EncodeBatch,
    *,
    block_size: int,
    pad_id: int,
    max_spans: int,
    head: Sequence[int] = (),
    tail: Sequence[int] = (),
) -> MarkedPrompt:
    """Tokenise pieces and lay them out on blocks.

    Args:
        pieces: The prompt's text in order.
        encode: Tokenises several texts.
        block_size: Tokens per KV block.
        pad_id: Token that fills a piece up.
        max_spans: Most spans allowed.
        head: Special tokens in front of the prompt (BOS).
        tail: Special tokens behind it.

    Returns:
        The prompt. A last piece is not padded: the model must go on from real text.

    Raises:
        MarkupError: A span without text, or more spans than ``max_spans``.
    """
    pieces = merge_ordinary(pieces)
    spans = [piece for piece in pieces if piece.is_span]
    for piece in spans:
        if not piece.text.strip():
            raise MarkupError(
                "the span has no text but white space; leave it out", piece.param, "empty_span"
            )
    if len(spans) > max_spans:
        raise MarkupError(
            f"{len(spans)} spans are more than the {max_spans} that this server allows "
            "(VLLM_V1_SPANS_MAX_SPANS)",
            spans[max_spans].param,
            "too_many_spans",
        )
    # Empty ordinary pieces take `head` and `tail`, so that special tokens never land in a span.
    if head and (not pieces or pieces[0].is_span):
        pieces.insert(0, TextPiece("", False))
    if tail and pieces and pieces[-1].is_span:
        pieces.append(TextPiece("", False))
    encoded = encode([piece.text for piece in pieces])
    token_ids: list[int] = []
    laid: list[LaidPiece] = []
    total_pads = 0
    for index, (piece, tokens) in enumerate(zip(pieces, encoded, strict=True)):
        if piece.is_span and not tokens:
            raise MarkupError(
                "the tokenizer makes no token of the span's text", piece.param, "empty_span"
            )
        is_last = index == len(pieces) - 1
        start = len(token_ids)
        if index == 0:
            token_ids += head
        token_ids += tokens
        if is_last:
            token_ids += tail
        if len(token_ids) == start:
            continue
        pads = 0 if is_last else -len(token_ids) % block_size
        token_ids += [pad_id] * pads
        total_pads += pads
        kind: PieceKind = "plus" if piece.is_span else "cross" if _has_span(laid) else "prefix"
        laid.append(LaidPiece(kind, start, len(token_ids), pads, piece.text))
    return MarkedPrompt(token_ids, tuple(laid), "".join(piece.text for piece in pieces), total_pads)


def _has_span(laid: Sequence[LaidPiece]) -> bool:
    return bool(laid) and laid[-1].kind != "prefix"
