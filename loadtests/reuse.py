"""The best reuse that a sequence of prompts allows; pure.

Two caches of unlimited size look at the prompts in order. Both keep whole blocks, as vLLM does, and always compute a
prompt's last unit, which has to be there to go on from:

* the *prefix cache* reuses a block whose whole prefix has been seen;
* the *span cache* also reuses a block of a span past its gap wherever the span stands. Pieces are padded to whole
  blocks, as the server does; pads count neither as prompt nor as reused.

What a server reaches is at most this; the difference is what it evicted or had not computed yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Units = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt.

    Attributes:
        units: Its tokens, or its characters.
        is_span: Whether it is a span.
    """

    units: Units
    is_span: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """Sums over all prompts, in units.

    Attributes:
        prompts: How many prompts.
        units: Their units.
        span_units: Those inside spans.
        prefix_reused: What the ideal prefix cache reuses.
        span_reused: What the ideal span cache reuses.
        gap_units: Units of gaps that the ideal span cache recomputes although their span is known.
    """

    prompts: int = 0
    units: int = 0
    span_units: int = 0
    prefix_reused: int = 0
    span_reused: int = 0
    gap_units: int = 0


class PrefixCache:
    """An ideal prefix cache.

    Args:
        block: Units of a block.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._seen: set[int] = set()

    def add(self, units: Units) -> int:
        """Look a prompt up, then keep it; returns the units reused."""
        parent, reused = 0, 0
        for start in range(0, len(units) - self._block + 1, self._block):
            parent = hash((parent, tuple(units[start : start + self._block])))
            # A key is chained, so a known one means a known prefix.
            if parent in self._seen and start + self._block < len(units):
                reused = start + self._block
            self._seen.add(parent)
        return reused


class _Block(NamedTuple):
    key: tuple[str, int] | None  # None: not full, so never kept
    units: int  # without pads
    is_gap: bool


class SpanCache:
    """An ideal span cache.

    Args:
        block: Units of a block.
        gap: Units recomputed at the start of a reused span.
    """

    def __init__(self, block: int, gap: int) -> None:
        self._block = block
        self._gap = gap
        self._seen: set[tuple[str, int] | None] = set()

    def add(self, segments: Sequence[Segment]) -> tuple[int, int]:
        """Look a prompt up, then keep it; returns the units reused, and those of gaps of known spans."""
        blocks = list(self._blocks(segments))
        # The last unit is always computed, and with it its block.
        found = [block.key in self._seen for block in blocks[:-1]] + [False]
        reused = sum(block.units for block, hit in zip(blocks, found, strict=False) if hit)
        gaps, body_is_found = 0, False
        for block, hit in zip(reversed(blocks), reversed(found), strict=False):
            if not block.is_gap:
                body_is_found = hit and block.key is not None and block.key[0] == "span"
            elif body_is_found and not hit:
                gaps += block.units
        self._seen.update(block.key for block in blocks if block.key is not None)
        return reused, gaps

    def _blocks(self, segments: Sequence[Segment]) -> Iterator[_Block]:
        exact = 0
        runs = list(_runs(segments))
        for number, run in enumerate(runs):
            own = 0
            if (
                run.is_span or number
            ):  # from the first span on, the layout is part of the exact chain
                exact = hash((exact, "span" if run.is_span else "cross"))
            is_last = number == len(runs) - 1
            for start in range(0, len(run.units), self._block):
                content = tuple(run.units[start : start + self._block])
                exact, own = hash((exact, content)), hash((own, content))
                is_gap = run.is_span and start < self._gap
                key = ("span", own) if run.is_span and not is_gap else ("exact", exact)
                is_kept = not is_last or len(content) == self._block
                yield _Block(key if is_kept else None, len(content), is_gap)


def best(prompts: Iterable[Sequence[Segment]], block: int, gap: int) -> Best:
    """Sum up what ideal caches reuse.

    Args:
        prompts: The prompts in the order of sending.
        block: Units of a block.
        gap: Units recomputed at the start of a reused span; a multiple of ``block``, or 0.
    """
    prefix, span = PrefixCache(block), SpanCache(block, gap)
    sums = [0] * 6
    for segments in prompts:
        flat = _concatenated(segments)
        reused, gaps = span.add(segments)
        in_spans = sum(len(segment.units) for segment in segments if segment.is_span)
        for index, value in enumerate((1, len(flat), in_spans, prefix.add(flat), reused, gaps)):
            sums[index] += value
    return Best(*sums)


def _concatenated(segments: Sequence[Segment]) -> Units:
    if all(isinstance(segment.units, str) for segment in segments):
        return "".join(str(segment.units) for segment in segments)
    return [unit for segment in segments for unit in segment.units]


def _runs(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Neighbouring ordinary segments are one piece for the server; spans stay apart."""
    held: list[Segment] = []
    for segment in segments:
        if not segment.units:
            continue
        if segment.is_span:
            if held:
                yield Segment(_concatenated(held))
                held = []
            yield segment
        else:
            held.append(segment)
    if held:
        yield Segment(_concatenated(held))
