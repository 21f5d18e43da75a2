"""Splitting a rendering at its sentinels: pure."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.sentinels import Sentinels, SpanSource

text = st.text(alphabet=" \n\tab_019é", max_size=12)
span_text = text.filter(lambda value: value.strip())


def sources(*texts: str, group: str = "messages") -> list[SpanSource]:
    return [SpanSource(value, f"part[{index}]", group) for index, value in enumerate(texts)]


@given(st.lists(st.tuples(text, span_text), min_size=1, max_size=5), text)
def test_split_gives_the_text_back(parts: list[tuple[str, str]], end: str) -> None:
    sentinels = Sentinels()
    marked = plain = ""
    for index, (before, span) in enumerate(parts):
        marked += before + sentinels.mark(span, index)
        plain += before + span
    marked, plain = marked + end, plain + end
    pieces = sentinels.split(marked, sources(*(span for _, span in parts)))
    assert "".join(piece.text for piece in pieces) == plain == sentinels.strip(marked)
    assert [piece.text for piece in pieces if piece.is_span] == [span for _, span in parts]


@pytest.mark.parametrize(
    "template", [str.strip, str.upper, lambda value: value.replace("\n", " "), json.dumps]
)
@given(before=text, span=span_text, after=text)
def test_sentinels_survive_what_templates_do_to_text(
    template: Callable[[str], str], before: str, span: str, after: str
) -> None:
    sentinels = Sentinels()
    marked = template(before + sentinels.mark(span, 0) + after)
    assert sentinels.strip(marked) == template(before + span + after)
    pieces = sentinels.split(marked, sources(span))
    (found,) = [piece.text for piece in pieces if piece.is_span]
    assert template(span.strip()).strip('"') in found


def test_text_beside_a_sentinel_cannot_move_it() -> None:
    sentinels = Sentinels()
    for length in range(1, len(sentinels.nonce)):
        before = sentinels.nonce[:length]
        pieces = sentinels.split(before + sentinels.mark("x", 0) + "0", sources("x"))
        assert [piece.text for piece in pieces] == [before, "x", "0"]


def broken(render: Callable[[Sentinels], str], given_sources: list[SpanSource]) -> MarkupError:
    sentinels = Sentinels()
    with pytest.raises(MarkupError) as caught:
        sentinels.split(render(sentinels), given_sources)
    assert caught.value.reason == "template"
    return caught.value


def test_a_dropped_span_is_refused() -> None:
    error = broken(lambda s: s.mark("a", 0), sources("a", "b"))
    assert error.param == "part[1]"


def test_a_repeated_span_is_refused() -> None:
    assert broken(lambda s: s.mark("a", 0) * 2, sources("a")).param == "part[0]"


def test_a_cut_span_is_refused() -> None:
    assert broken(lambda s: s.mark("abc", 0)[:-5], sources("abc")).param == "part[0]"


def test_a_turned_span_is_refused() -> None:
    def turned(s: Sentinels) -> str:
        marked = s.mark("-", 0)
        left, right = marked.split("-")
        return right + "-" + left

    assert broken(turned, sources("-")).param == "part[0]"


def test_reordered_spans_are_refused() -> None:
    error = broken(lambda s: s.mark("b", 1) + s.mark("a", 0), sources("a", "b"))
    assert error.param == "part[1]"


def test_nested_spans_are_refused() -> None:
    both = [SpanSource("a", "x", "documents"), SpanSource("b", "y", "messages")]
    broken(lambda s: s.mark("a-a", 0).replace("-", s.mark("b", 1)), both)


def test_documents_may_stand_in_front_of_or_behind_messages() -> None:
    sentinels = Sentinels()
    both = [SpanSource("a", "x", "documents"), SpanSource("b", "y", "messages")]
    pieces = sentinels.split(sentinels.mark("b", 1) + sentinels.mark("a", 0), both)
    assert [piece.param for piece in pieces if piece.is_span] == ["y", "x"]


def documents_pieces(frame: str, numbered: bool) -> list[tuple[str, bool]]:
    sentinels = Sentinels()
    marked = "rules\n"
    for index, value in enumerate("abc"):
        marked += frame.format(index if numbered else "", sentinels.mark(value, index))
    marked += "<user>"
    return [
        (piece.text, piece.is_span)
        for piece in sentinels.split(marked, sources(*"abc", group="documents"))
        if piece.text
    ]


def test_a_frame_that_is_the_same_for_all_documents_is_in_their_spans() -> None:
    assert documents_pieces("<doc{}>\n{}</doc>\n", numbered=False) == [
        ("rules\n", False),
        ("<doc>\na</doc>\n", True),
        ("<doc>\nb</doc>\n", True),
        ("<doc>\nc</doc>\n", True),
        ("<user>", False),
    ]


def test_a_numbered_frame_is_not() -> None:
    assert [
        piece for piece, is_span in documents_pieces("<doc{}>\n{}</doc>\n", True) if is_span
    ] == [
        "a",
        "b",
        "c",
    ]
