"""Delimiter, token offsets, marker tokens and options: the pure parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.markup.delimiter import split_delimited
from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.offsets import from_markers, from_offsets, has_offsets
from vllm_spans.markup.options import read_options

D = "<|span|>"
PLUS, CROSS = 7, 8


def split(text: str) -> list[tuple[str, bool]]:
    return [(piece.text, piece.is_span) for piece in split_delimited(text, D, "prompt")]


def test_text_between_neighbouring_delimiters_is_a_span() -> None:
    assert split(f"rules{D}A{D}B{D}question") == [
        ("rules", False),
        ("A", True),
        ("B", True),
        ("question", False),
    ]


def test_a_double_delimiter_ends_a_span_for_good() -> None:
    assert split(f"{D}A{D}{D}remark{D}B{D}question") == [
        ("", False),
        ("A", True),
        ("remark", False),
        ("B", True),
        ("question", False),
    ]


def test_no_delimiter_is_ordinary_text() -> None:
    assert split("plain") == [("plain", False)]


def test_a_single_delimiter_is_refused() -> None:
    with pytest.raises(MarkupError) as caught:
        split(f"a{D}b")
    assert caught.value.param == "prompt"


@given(st.lists(st.text(alphabet="ab \n<|", max_size=5), min_size=3, max_size=9))
def test_pieces_are_the_text_without_delimiters(parts: list[str]) -> None:
    text = D.join(parts)
    assert "".join(piece for piece, _ in split(text)) == text.replace(D, "")


def offsets(tokens: int = 100, **xargs: Any) -> Any:
    return from_offsets(list(range(tokens)), xargs, block_size=16, max_spans=3)


def test_offsets_cover_the_prompt() -> None:
    prompt = offsets(span_starts=[16, 32], cross_span_starts=[64], span_pad_tokens=5)
    assert [(piece.kind, piece.start, piece.end) for piece in prompt.pieces] == [
        ("prefix", 0, 16),
        ("plus", 16, 32),
        ("plus", 32, 64),
        ("cross", 64, 100),
    ]
    assert prompt.token_ids == list(range(100))
    assert prompt.extra_args() == {
        "span_starts": [16, 32],
        "cross_span_starts": [64],
        "span_pad_tokens": 5,
    }


@pytest.mark.parametrize(
    ("xargs", "param"),
    [
        ({"span_starts": [8]}, "span_starts"),
        ({"span_starts": [32, 16]}, "span_starts"),
        ({"span_starts": [16, 16]}, "span_starts"),
        ({"span_starts": [112]}, "span_starts"),
        ({"span_starts": [-16]}, "span_starts"),
        ({"span_starts": "16"}, "span_starts"),
        ({"span_starts": [16.0]}, "span_starts"),
        ({"span_starts": [True]}, "span_starts"),
        ({"span_starts": 16}, "span_starts"),
        ({"cross_span_starts": [16]}, "cross_span_starts"),
        ({"span_starts": [32], "cross_span_starts": [16]}, "cross_span_starts"),
        ({"span_starts": [32], "cross_span_starts": [32]}, "cross_span_starts"),
        ({"span_starts": [32], "cross_span_starts": [40]}, "cross_span_starts"),
        ({"span_starts": [16], "span_pad_tokens": 101}, "span_pad_tokens"),
        ({"span_starts": [16], "span_pad_tokens": "5"}, "span_pad_tokens"),
        ({"span_starts": [0, 16, 32, 48]}, "span_starts"),
    ],
)
def test_wrong_offsets_name_the_part_at_fault(xargs: dict[str, Any], param: str) -> None:
    assert has_offsets(xargs)
    with pytest.raises(MarkupError) as caught:
        offsets(**xargs)
    assert caught.value.param == f"vllm_xargs.{param}"


@pytest.mark.parametrize("xargs", [None, {}, {"span_starts": []}, {"other": 1}])
def test_no_offsets(xargs: dict[str, Any] | None) -> None:
    assert not has_offsets(xargs)


def markers(tokens: list[int], cross: int | None = CROSS) -> Any:
    return from_markers(tokens, token_plus=PLUS, token_cross=cross, block_size=4, max_spans=3)


def test_markers_count_only_at_block_starts() -> None:
    prompt = markers([1, PLUS, 1, 1, PLUS, PLUS, CROSS, 1, PLUS, 1, 1, 1, CROSS, 1, PLUS])
    assert [(piece.kind, piece.start, piece.end) for piece in prompt.pieces] == [
        ("prefix", 0, 4),
        ("plus", 4, 8),
        ("plus", 8, 12),
        ("cross", 12, 15),
    ]


@pytest.mark.parametrize("tokens", [[], [1, PLUS], [CROSS, 1, 1, 1, CROSS], [1] * 4 + [2, PLUS]])
def test_tokens_without_a_marker_at_a_block_start(tokens: list[int]) -> None:
    assert markers(tokens) is None


def test_too_many_marked_spans() -> None:
    with pytest.raises(MarkupError) as caught:
        markers([PLUS] * 16)
    assert (caught.value.param, caught.value.reason) == ("prompt", "too_many_spans")


@pytest.mark.parametrize(
    ("spans", "xargs", "found"),
    [
        (None, None, {}),
        ({}, {}, {}),
        ({"gap_policy": None}, None, {}),
        ({"gap_policy": "none"}, None, {"span_gap_policy": "none"}),
        ({"gap_length": 64}, None, {"span_gap_length": 64}),
        (None, {"span_gap_policy": "full", "other": 1}, {"span_gap_policy": "full"}),
        ({"gap_length": 32}, {"span_gap_length": 32}, {"span_gap_length": 32}),
    ],
)
def test_options(spans: Any, xargs: Any, found: dict[str, Any]) -> None:
    assert read_options(spans, xargs, 32) == found


@pytest.mark.parametrize(
    ("spans", "xargs", "param"),
    [
        ({"policy": "none"}, None, "spans.policy"),
        ({"gap_policy": "legoblock"}, None, "spans.gap_policy"),
        ({"gap_policy": ["none"]}, None, "spans.gap_policy"),
        ({"gap_length": 33}, None, "spans.gap_length"),
        ({"gap_length": 0}, None, "spans.gap_length"),
        ({"gap_length": "32"}, None, "spans.gap_length"),
        ({"gap_length": True}, None, "spans.gap_length"),
        ("none", None, "spans"),
        ([], None, "spans"),
        (None, {"span_start": [0]}, "vllm_xargs.span_start"),
        (None, {"span_gap_length": 32.0}, "vllm_xargs.span_gap_length"),
        ({"gap_length": 32}, {"span_gap_length": 64}, "spans.gap_length"),
    ],
)
def test_wrong_options_name_the_part_at_fault(spans: Any, xargs: Any, param: str) -> None:
    with pytest.raises(MarkupError) as caught:
        read_options(spans, xargs, 32)
    assert caught.value.param == param
