"""Sentinels: private strings around spans that survive a chat template; pure.

A sentinel is ``_`` and digits only. Digits have no case, need no escaping in JSON, HTML or URLs and are
not white space, so the filters that templates use (``trim``, ``tojson``, ``upper`` ...) leave them
alone. ``_`` occurs only at its start, so no text around a sentinel can shift where it is found.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.pieces import TextPiece

_NONCE_DIGITS = 24
_OPEN, _CLOSE, _TITLE = "0", "1", "2"


@dataclass(frozen=True, slots=True)
class SpanSource:
    """A span before rendering.

    Attributes:
        text: Its text, white space at its ends included.
        param: The part of the request it comes from.
        group: Spans of one group must keep their order in the rendering.
        is_part: It is a content part. vLLM joins parts with a line end for most templates; that one
            belongs to the part in front, or it would make a segment of its own between two spans.
    """

    text: str
    param: str
    group: str
    is_part: bool = False


@dataclass(slots=True)
class _Region:
    start: int
    end: int
    title: int | None
    source: SpanSource


class Sentinels:
    """The sentinels of one rendering."""

    def __init__(self) -> None:
        self.nonce = "_" + "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        self._pattern = re.compile(re.escape(self.nonce) + r"(\d{6})([012])")

    def mark(self, text: str, index: int) -> str:
        """Put the sentinels of span ``index`` around a text.

        White space at the text's ends stays outside: a template that trims the text then trims what
        it trims without sentinels.
        """
        core = text.strip()
        lead = text[: len(text) - len(text.lstrip())]
        trail = text[len(text.rstrip()) :]
        return f"{lead}{self._make(index, _OPEN)}{core}{self._make(index, _CLOSE)}{trail}"

    def mark_title(self, title: str, index: int) -> str:
        """Put the title sentinel of span ``index`` in front of a title."""
        core = title.lstrip()
        if not core:
            return title
        return title[: len(title) - len(core)] + self._make(index, _TITLE) + core

    def strip(self, text: str) -> str:
        """The text without sentinels."""
        return self._pattern.sub("", text)

    def seen(self, text: str) -> set[int]:
        """Numbers of the spans with a sentinel in the text."""
        return {int(match.group(1)) for match in self._pattern.finditer(text)}

    def _make(self, index: int, kind: str) -> str:
        return f"{self.nonce}{index:06d}{kind}"

    def split(self, marked: str, sources: Sequence[SpanSource]) -> list[TextPiece]:
        """Split a rendering at its sentinels.

        Args:
            marked: The rendering of the marked request.
            sources: The spans by number.

        Returns:
            Pieces whose texts, joined, are the rendering without sentinels.

        Raises:
            MarkupError: The template drops, repeats, nests or reorders spans.
        """
        plain, regions = self._regions(marked, sources)
        _take_white_space(plain, regions)
        _take_titles(regions)
        _take_frames(plain, regions)
        pieces: list[TextPiece] = []
        position = 0
        for region in regions:
            pieces.append(TextPiece(plain[position : region.start], False))
            pieces.append(TextPiece(plain[region.start : region.end], True, region.source.param))
            position = region.end
        pieces.append(TextPiece(plain[position:], False))
        return pieces

    def _regions(self, marked: str, sources: Sequence[SpanSource]) -> tuple[str, list[_Region]]:
        places: list[dict[str, list[int]]] = [{_OPEN: [], _CLOSE: [], _TITLE: []} for _ in sources]
        chunks: list[str] = []
        length = position = 0
        for match in self._pattern.finditer(marked):
            chunks.append(marked[position : match.start()])
            length += len(chunks[-1])
            position = match.end()
            places[int(match.group(1))][match.group(2)].append(length)
        chunks.append(marked[position:])
        plain = "".join(chunks)

        regions: list[_Region] = []
        for source, found in zip(sources, places, strict=True):
            opens, closes, titles = found[_OPEN], found[_CLOSE], found[_TITLE]
            if len(opens) != len(closes) or not opens:
                raise _template_error("does not render this text whole", source)
            if len(opens) > 1:
                raise _template_error("renders this text more than once", source)
            if opens[0] >= closes[0]:
                raise _template_error("rearranges this text", source)
            title = titles[0] if len(titles) == 1 else None
            regions.append(_Region(opens[0], closes[0], title, source))
        for group in {source.group for source in sources}:
            ordered = [region for region in regions if region.source.group == group]
            for left, right in itertools.pairwise(ordered):
                if right.start < left.end:
                    raise _template_error("renders this text out of order", right.source)
        regions.sort(key=lambda region: region.start)
        for left, right in itertools.pairwise(regions):
            if right.start < left.end:
                raise _template_error("renders this text inside another span", right.source)
        return plain, regions


def _template_error(what: str, source: SpanSource) -> MarkupError:
    return MarkupError(
        f"the model's chat template {what}, so it cannot be a span here; send it unmarked",
        source.param,
        "template",
    )


def _take_white_space(plain: str, regions: list[_Region]) -> None:
    """Give a span the white space at its ends back, as much as the template left of it."""
    for index, region in enumerate(regions):
        text = region.source.text
        trail = text[len(text.rstrip()) :]
        limit = regions[index + 1].start if index + 1 < len(regions) else len(plain)
        room = plain[region.end : min(limit, region.end + len(trail))]
        taken = _common_prefix(trail, room)
        region.end += taken
        whole = taken == len(trail)
        if region.source.is_part and whole and region.end < limit and plain[region.end] == "\n":
            region.end += 1
        lead = text[: len(text) - len(text.lstrip())]
        limit = regions[index - 1].end if index else 0
        room = plain[max(limit, region.start - len(lead)) : region.start]
        region.start -= _common_prefix(lead[::-1], room[::-1])


def _common_prefix(left: str, right: str) -> int:
    """Characters that two strings have in common at their start."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _take_titles(regions: list[_Region]) -> None:
    """Begin a document at its title where the title stands between the document before and its text."""
    floor = 0
    for region in regions:
        if region.title is not None and floor <= region.title < region.start:
            region.start = region.title
        floor = region.end


def _take_frames(plain: str, regions: list[_Region]) -> None:
    """Take the template's text around each document into its span where it is the same for all.

    Between two documents a template writes the foot of the one and the head of the next. If that is
    one and the same string everywhere (no number in it), it belongs to every document alike: spans
    then touch each other and keep their tokens in any order. It is cut only behind a line end, so that
    no special token is torn.
    """
    documents = [region for region in regions if region.source.group == "documents"]
    if len(documents) < 2 or documents != regions[regions.index(documents[0]) :][: len(documents)]:
        return
    between = {plain[left.end : right.start] for left, right in itertools.pairwise(documents)}
    if len(between) != 1:
        return
    frame = between.pop()
    first, last = documents[0], documents[-1]
    position = regions.index(first)
    floor = regions[position - 1].end if position else 0
    position += len(documents)
    ceiling = regions[position].start if position < len(regions) else len(plain)
    cuts = [len(frame), *(i + 1 for i in range(len(frame)) if frame[i] == "\n"), 0]
    for cut in cuts:
        foot, head = frame[:cut], frame[cut:]
        if plain[last.end : ceiling].startswith(foot) and plain[floor : first.start].endswith(head):
            for region in documents:
                region.start -= len(head)
                region.end += len(foot)
            return
