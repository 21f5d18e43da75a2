"""Prevents a layout that the engine would misread: spans that overlap, are not aligned or swallow the last token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import BLOCK, Prompt, prompts
from vllm_spans.core.layout import SpanLayout, SpanLayoutError


def read(plus: object, cross: object, total: int = 64) -> SpanLayout | None:
    return SpanLayout.from_extra_args(
        {"span_starts": plus, "cross_span_starts": cross}, total, BLOCK
    )


def test_a_span_ends_at_the_next_start_of_either_kind() -> None:
    layout = read([4, 12, 24], [20, 40])
    assert layout is not None
    assert [(span.start, span.end) for span in layout.spans] == [(4, 12), (12, 20), (24, 40)]
    assert layout.prefix_end == 4


def test_the_block_of_the_last_token_is_never_in_a_span() -> None:
    aligned = read([4], [], total=16)
    assert aligned is not None and aligned.spans[0].end == 12
    odd = read([4], [], total=17)
    assert odd is not None and odd.spans[0].end == 16
    assert read([12], [], total=16) is None


@pytest.mark.parametrize(
    "args", [None, {}, {"span_starts": []}, {"span_starts": [], "cross_span_starts": []}]
)
def test_no_span_is_no_layout(args: dict | None) -> None:
    assert SpanLayout.from_extra_args(args, 64, BLOCK) is None


@pytest.mark.parametrize(
    ("plus", "cross", "param", "says"),
    [
        ([3], [], "span_starts", "not a multiple"),
        ([4, 4], [], "span_starts", "does not increase"),
        ([8, 4], [], "span_starts", "does not increase"),
        ([64], [], "span_starts", "outside the prompt"),
        ([-4], [], "span_starts", "outside the prompt"),
        ("4", [], "span_starts", "list of token offsets"),
        ([True], [], "span_starts", "list of token offsets"),
        ([4.0], [], "span_starts", "list of token offsets"),
        ([4], [6], "cross_span_starts", "not a multiple"),
        ([4], [4], "cross_span_starts", "in span_starts and in"),
        ([8], [4], "cross_span_starts", "before the first span"),
        ([], [4], "cross_span_starts", "without span_starts"),
    ],
)
def test_bad_offsets_are_named(plus: object, cross: object, param: str, says: str) -> None:
    with pytest.raises(SpanLayoutError, match=says) as caught:
        read(plus, cross)
    assert caught.value.param == param


@given(prompts())
def test_spans_are_disjoint_aligned_and_inside(prompt: Prompt) -> None:
    end = prompt.layout.prefix_end
    for span in prompt.layout.spans:
        assert end <= span.start < span.end < len(prompt.tokens)
        assert span.start % BLOCK == span.end % BLOCK == 0
        end = span.end


@given(
    st.lists(st.integers(-8, 80), max_size=6),
    st.lists(st.integers(-8, 80), max_size=6),
    st.integers(1, 70),
)
def test_any_offsets_give_a_layout_or_an_error(
    plus: list[int], cross: list[int], total: int
) -> None:
    try:
        layout = read(plus, cross, total)
    except SpanLayoutError as error:
        assert error.param in ("span_starts", "cross_span_starts")
        return
    if layout is not None:
        assert all(0 <= span.start < span.end < total for span in layout.spans)
