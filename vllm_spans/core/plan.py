"""ReusePlan: what a request takes from the cache and what it computes, in which order.

A pure function of the layout, the keys and what is cached. It knows no vLLM object; blocks are positions in the
request's block table.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_spans.core.hashing import Key
from vllm_spans.core.layout import SpanLayout
from vllm_spans.core.policy import GapPolicy


class SegmentKind(enum.Enum):
    """What a computed token range is to the request."""

    ISOLATED = "isolated"
    PREFIX = "prefix"
    GAP = "gap"
    CROSS = "cross"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to compute in one go.

    Attributes:
        kind: ``ISOLATED``: over the span alone, positions from 0. All others: in the request's context.
        start: First token, as an offset in the prompt, a multiple of the block size.
        end: One past the last token.
        span: Index of the span, for ``ISOLATED`` and ``GAP``.
    """

    kind: SegmentKind
    start: int
    end: int
    span: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Plan of one admission.

    Attributes:
        hits: Per block of the table whether it is taken from the cache.
        loads: Blocks of the table that are filled from another tier, in order, before any segment runs.
        aliases: Block of the table -> earlier block that this plan computes or loads under the same S key; both
            positions share it.
        segments: What to compute before the request itself continues, in order. An isolated segment comes before
            every contextual one that can see it.
        resume_at: Offset from which the request itself computes up to its last token.
        lookup_tokens: Tokens of plus spans past their gap.
        isolated_tokens: Those of them that are computed; the rest is reused.
        loaded_spans: Blocks of ``loads`` that are span blocks past a gap.
        isolated_head_tokens: Tokens under a gap that are computed in isolation too, since a cold block behind
            them attends to them.
        gap_tokens: Gap tokens recomputed.
        cached_tokens: Tokens of the request that are not computed: prefix, history and span hits.
    """

    hits: tuple[bool, ...]
    loads: tuple[int, ...]
    aliases: dict[int, int]
    segments: tuple[Segment, ...]
    resume_at: int
    lookup_tokens: int
    isolated_tokens: int
    loaded_spans: tuple[int, ...]
    isolated_head_tokens: int
    gap_tokens: int
    cached_tokens: int

    @property
    def reused_tokens(self) -> int:
        """Span tokens whose KV is taken as it is."""
        return self.lookup_tokens - self.isolated_tokens


def make_plan(
    layout: SpanLayout,
    policy: GapPolicy,
    block_size: int,
    num_tokens: int,
    found: Sequence[bool],
    span_keys: Sequence[Sequence[Key]],
    is_cached: Callable[[Key], bool],
    loadable: Sequence[bool] = (),
) -> ReusePlan:
    """Plan the computation of a request.

    Args:
        layout: Spans of the prompt.
        policy: Gap policy of the request; not ``full``.
        block_size: Tokens per block.
        num_tokens: Tokens known so far: the prompt, after a preemption also the output.
        found: Per block of the table whether its key is cached; the last entry does not matter.
        span_keys: Per span the S keys of all its blocks.
        is_cached: Whether KV under a key can be taken; asked for blocks under a gap.
        loadable: Per block of the table whether another tier holds its key; what is missing at the end is not
            loadable. A block that is found is not loaded.

    Returns:
        The plan. The block that holds the last token is always computed.
    """
    num_blocks = -(-num_tokens // block_size)
    kinds, owner = _classify(layout, policy, block_size, num_blocks)
    # The last token is computed for its logits, whatever is cached.
    hits = [*found[: num_blocks - 1], False]
    can_load = [*loadable[: num_blocks - 1], *[False] * num_blocks]
    loads: list[int] = []
    loaded_spans: list[int] = []
    aliases: dict[int, int] = {}
    provided: dict[Key, int] = {}
    cold_in: dict[int, list[int]] = {}
    contextual: list[int] = []
    for block, hit in enumerate(hits):
        if hit:
            continue
        index = owner[block]
        if index is None or kinds[block] is not SegmentKind.ISOLATED:
            (loads if can_load[block] else contextual).append(block)
            continue
        offset = block - layout.spans[index].start // block_size
        earlier = provided.setdefault(span_keys[index][offset], block)
        if earlier != block:
            aliases[block] = earlier
        elif can_load[block]:
            loads.append(block)
            loaded_spans.append(block)
        else:
            cold_in.setdefault(index, []).append(offset)

    isolated: list[Segment] = []
    head_tokens = 0
    for index, cold in cold_in.items():
        first, keys = layout.spans[index].start // block_size, span_keys[index]
        heads = [
            start // block_size - first + step
            for start, end in policy.gaps(layout.spans[index])
            for step in range((end - start) // block_size)
        ]
        missing_heads = [head for head in heads if head < cold[-1] and not is_cached(keys[head])]
        head_tokens += len(missing_heads) * block_size
        todo = sorted(first + offset for offset in (*cold, *missing_heads))
        isolated.extend(
            Segment(SegmentKind.ISOLATED, start * block_size, end * block_size, index)
            for start, end in runs(todo)
        )

    segments, resume_at = _order(contextual, kinds, owner, isolated, block_size)
    lookup = kinds.count(SegmentKind.ISOLATED)
    cold_blocks = sum(map(len, cold_in.values()))
    missed_gaps = sum(kinds[block] is SegmentKind.GAP for block in contextual)
    return ReusePlan(
        hits=tuple(hits),
        loads=tuple(loads),
        aliases=aliases,
        segments=tuple(segments),
        resume_at=resume_at,
        lookup_tokens=lookup * block_size,
        isolated_tokens=cold_blocks * block_size,
        loaded_spans=tuple(loaded_spans),
        isolated_head_tokens=head_tokens,
        gap_tokens=missed_gaps * block_size,
        cached_tokens=(sum(hits) + len(loads) + len(aliases)) * block_size,
    )


def _classify(
    layout: SpanLayout, policy: GapPolicy, block_size: int, num_blocks: int
) -> tuple[list[SegmentKind], list[int | None]]:
    """What each block is, and the span it belongs to; ``ISOLATED`` stands for a span block past its gap."""
    prefix_blocks = layout.prefix_end // block_size
    kinds = [SegmentKind.PREFIX] * prefix_blocks
    kinds += [SegmentKind.CROSS] * (num_blocks - prefix_blocks)
    owner: list[int | None] = [None] * num_blocks
    for index, span in enumerate(layout.spans):
        first, last = span.start // block_size, span.end // block_size
        kinds[first:last] = [SegmentKind.ISOLATED] * (last - first)
        owner[first:last] = [index] * (last - first)
        for start, end in policy.gaps(span):
            first, last = start // block_size, end // block_size
            kinds[first:last] = [SegmentKind.GAP] * (last - first)
    return kinds, owner


def _order(
    contextual: Sequence[int],
    kinds: Sequence[SegmentKind],
    owner: Sequence[int | None],
    isolated: Sequence[Segment],
    block_size: int,
) -> tuple[list[Segment], int]:
    """Interleave isolated and contextual segments; the last contextual run is left to the request itself."""
    contextual_runs = list(runs(contextual))
    resume_block, _ = contextual_runs.pop()
    segments: list[Segment] = []
    waiting = list(reversed(isolated))
    for run_start, run_end in contextual_runs:
        for first, last in _same(
            range(run_start, run_end), lambda block: (kinds[block], owner[block])
        ):
            # A token sees what stands before it: that must be there, and what comes later need not.
            while waiting and waiting[-1].start < first * block_size:
                segments.append(waiting.pop())
            segments.append(
                Segment(kinds[first], first * block_size, last * block_size, owner[first])
            )
    segments.extend(reversed(waiting))
    return segments, resume_block * block_size


def runs(blocks: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Maximal half-open runs of consecutive numbers."""
    start = previous = None
    for block in blocks:
        if previous is not None and block == previous + 1:
            previous = block
            continue
        if start is not None and previous is not None:
            yield start, previous + 1
        start = previous = block
    if start is not None and previous is not None:
        yield start, previous + 1


def runs_by_span(blocks: Iterable[int], layout: SpanLayout, block_size: int) -> list[range]:
    """Maximal runs of consecutive blocks that lie in one span, or in none.

    Args:
        blocks: Blocks of a table, increasing.
        layout: Spans of the prompt.
        block_size: Tokens per block.
    """
    spans = layout.spans
    starts = [span.start for span in spans]

    def owner(block: int) -> int | None:
        index = bisect.bisect_right(starts, block * block_size) - 1
        return index if index >= 0 and block * block_size < spans[index].end else None

    return [
        range(first, last)
        for start, end in runs(blocks)
        for first, last in _same(range(start, end), owner)
    ]


def _same(blocks: Iterable[int], label: Callable[[int], object]) -> Iterable[tuple[int, int]]:
    """Cut a run of blocks where the label changes."""
    start = previous = None
    for block in blocks:
        if start is None:
            start = block
        elif previous is not None and label(block) != label(start):
            yield start, block
            start = block
        previous = block
    if start is not None and previous is not None:
        yield start, previous + 1
