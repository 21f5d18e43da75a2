"""Pieces to tokens and layout: properties over random pieces with a transparent tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.core.layout import SpanLayout
from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.pieces import TextPiece, assemble

PAD = 0
HEAD, TAIL = 1, 2


def encode(texts: list[str]) -> list[list[int]]:
    """One token per character."""
    return [[ord(character) + 10 for character in text] for text in texts]


def decode(tokens: list[int]) -> str:
    return "".join(chr(token - 10) for token in tokens if token >= 10)


texts = st.text(max_size=40)
span_texts = texts.filter(lambda text: text.strip())
pieces = st.lists(
    st.one_of(
        texts.map(lambda text: TextPiece(text, False)),
        span_texts.map(lambda text: TextPiece(text, True)),
    ),
    min_size=1,
    max_size=12,
)


@given(pieces, st.sampled_from([1, 16, 32]), st.booleans(), st.booleans())
def test_layout_properties(
    given_pieces: list[TextPiece], block_size: int, has_head: bool, has_tail: bool
) -> None:
    prompt = assemble(
        given_pieces,
        encode,
        block_size=block_size,
        pad_id=PAD,
        max_spans=99,
        head=[HEAD] if has_head else [],
        tail=[TAIL] if has_tail else [],
    )
    text = "".join(piece.text for piece in given_pieces)
    assert prompt.text == text
    assert decode(prompt.tokens_without_pads()) == text
    # Pieces cover the prompt, in order, and pads stand only at their ends.
    position = 0
    for piece in prompt.pieces:
        assert piece.start == position < piece.end
        position = piece.end
        assert piece.start % block_size == 0
        assert 0 <= piece.pads < block_size
        assert prompt.token_ids[piece.end - piece.pads : piece.end] == [PAD] * piece.pads
    assert position == len(prompt.token_ids)
    assert prompt.pad_tokens == sum(piece.pads for piece in prompt.pieces)
    assert prompt.token_ids.count(PAD) == prompt.pad_tokens
    # Each span is its own text's tokens and nothing else, special tokens included.
    spans = [piece.text for piece in given_pieces if piece.is_span]
    laid = [piece for piece in prompt.pieces if piece.kind == "plus"]
    assert [piece.text for piece in laid] == spans
    for piece, span in zip(laid, spans, strict=True):
        assert prompt.token_ids[piece.start : piece.end - piece.pads] == encode([span])[0]
    assert prompt.pieces == () or prompt.pieces[-1].pads == 0
    # The engine takes what the markup makes.
    layout = SpanLayout.from_extra_args(prompt.extra_args(), len(prompt.token_ids), block_size)
    if layout is not None:
        ends = {piece.start: piece.end for piece in laid}
        for span in layout.spans:
            assert span.end <= ends[span.start]


@given(st.lists(span_texts, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_span_has_the_same_tokens_anywhere(documents: list[str], random: object) -> None:
    shuffled = list(documents)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def spans_of(order: list[str], prefix: str) -> dict[str, list[int]]:
        parts = [TextPiece(prefix, False), *(TextPiece(text, True) for text in order)]
        prompt = assemble(
            [*parts, TextPiece("?", False)], encode, block_size=16, pad_id=PAD, max_spans=9
        )
        return {
            str(piece.text): prompt.token_ids[piece.start : piece.end]
            for piece in prompt.pieces
            if piece.kind == "plus"
        }

    assert spans_of(documents, "one") == spans_of(shuffled, "another prefix, longer than a block")


def test_adjacent_spans_have_no_segment_between_them() -> None:
    prompt = assemble(
        [TextPiece("a", True), TextPiece("", False), TextPiece("b", True), TextPiece("c", False)],
        encode,
        block_size=16,
        pad_id=PAD,
        max_spans=9,
    )
    assert prompt.span_starts == [0, 16]
    assert prompt.cross_span_starts == [32]


def test_neighbouring_ordinary_text_is_one_segment() -> None:
    prompt = assemble(
        [TextPiece("a", True), TextPiece("b", False), TextPiece("c", False)],
        encode,
        block_size=16,
        pad_id=PAD,
        max_spans=9,
    )
    assert prompt.cross_span_starts == [16]


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_a_span_without_text_is_refused(text: str) -> None:
    with pytest.raises(MarkupError) as caught:
        assemble([TextPiece(text, True, "here")], encode, block_size=16, pad_id=PAD, max_spans=9)
    assert (caught.value.param, caught.value.reason) == ("here", "empty_span")


def test_too_many_spans_name_the_first_one_too_many() -> None:
    spans = [TextPiece("a", True, f"documents[{index}]") for index in range(4)]
    with pytest.raises(MarkupError) as caught:
        assemble(spans, encode, block_size=16, pad_id=PAD, max_spans=2)
    assert (caught.value.param, caught.value.reason) == ("documents[2]", "too_many_spans")
