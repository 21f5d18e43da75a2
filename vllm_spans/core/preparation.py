"""Turns the segments of a plan into rows, step by step, within the budgets of a step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_spans.core.plan import ReusePlan, Segment, SegmentKind, runs
from vllm_spans.core.rows import Row, contextual_group, isolated_group

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_spans.core.block_tables import SpanBlockTables
    from vllm_spans.core.request_spans import RequestSpans
    from vllm_spans.metrics.stats import SpanStats


@dataclass
class RowBudget:
    """What is left of a step.

    Attributes:
        tokens: Tokens.
        rows: Row slots of the worker.
        requests: Requests that may still be admitted.
    """

    tokens: int
    rows: int
    requests: int


class Preparation:
    """Runs plans.

    Args:
        tables: Block tables of the requests.
        block_size: Tokens per block.
    """

    def __init__(self, tables: SpanBlockTables, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._row_numbers = itertools.count()
        self._released: list[KVCacheBlock] = []

    def begin(self, spans: RequestSpans, plan: ReusePlan) -> None:
        """Start on the plan of an admitted request."""
        spans.plan = plan
        spans.todo = list(reversed(plan.segments))
        spans.offset = spans.todo[-1].start if spans.todo else 0

    def abandon(self, spans: RequestSpans) -> None:
        """Drop a plan, finished or not."""
        self._close_span(spans)
        spans.plan = None
        spans.todo = []
        spans.load_job = None
        spans.loaded_tokens = {}

    def release_heads(self) -> None:
        """Give back the head blocks of the last step.

        Not sooner: a block given back within a step could be handed to another request of the same step, and
        both would write to it.
        """
        if self._released:
            self._tables.release(self._released)
            self._released = []

    def take_rows(
        self, request: Request, spans: RequestSpans, budget: RowBudget, stats: SpanStats
    ) -> list[Row]:
        """Make as many rows as the budget allows, in the plan's order.

        Args:
            request: In preparation.
            spans: Its spans.
            budget: Of this step; what the rows use is taken off.
            stats: Counts segments and head tokens.

        Returns:
            Rows of this step. All that a row reads is written by an earlier step or by this one: every layer
            writes the KV of the whole batch before any attention.
        """
        rows: list[Row] = []
        previous: Segment | None = None
        if not spans.loaded:
            return rows
        while spans.todo and budget.tokens > 0:
            segment = spans.todo[-1]
            if segment.kind is SegmentKind.ISOLATED:
                if spans.open_span != segment.span:
                    if not self._open_span(request, spans, stats):
                        break
                    segment = spans.todo[-1]
            elif spans.open_span is not None:
                self._close_span(spans)
            extends = (
                bool(rows)
                and previous is not None
                and segment.kind is not SegmentKind.ISOLATED
                and previous.kind is not SegmentKind.ISOLATED
                and previous.end == spans.offset
            )
            if not extends and budget.rows <= 0:
                break
            end = min(segment.end, spans.offset + budget.tokens)
            budget.tokens -= end - spans.offset
            if extends:
                rows[-1].end = end
            else:
                rows.append(self._make_row(request, spans, segment, end))
                budget.rows -= 1
            self._publish(request, spans, segment, spans.offset, end)
            spans.offset = end
            previous = segment
            if end == segment.end:
                stats.count_segment(segment.kind)
                spans.todo.pop()
                if spans.todo:
                    spans.offset = spans.todo[-1].start
        if not spans.todo:
            self._close_span(spans)
        return rows

    def _make_row(self, request: Request, spans: RequestSpans, segment: Segment, end: int) -> Row:
        origin, group = 0, contextual_group(request.request_id)
        table = self._tables.table(request)
        if segment.kind is SegmentKind.ISOLATED:
            assert segment.span is not None
            origin = spans.layout.spans[segment.span].start
            group = isolated_group(request.request_id, segment.span)
            first, last = origin // self._block_size, -(-end // self._block_size)
            table = self._isolated_table(spans, table[first:last])
        return Row(
            number=next(self._row_numbers),
            request_id=request.request_id,
            group=group,
            all_tokens=request._all_token_ids,
            origin=origin,
            table=table,
            start=spans.offset - origin,
            end=end - origin,
            lora=request.lora_request,
        )

    def _isolated_table(
        self, spans: RequestSpans, blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """A span's blocks in the request's table, with the isolated KV in place of that under its gap."""
        for offset, block in spans.heads.items():
            if offset < len(blocks):
                blocks[offset] = block
        return blocks

    def _publish(
        self, request: Request, spans: RequestSpans, segment: Segment, start: int, end: int
    ) -> None:
        """Publish the blocks that tokens ``[start, end)`` complete."""
        first, last = start // self._block_size, end // self._block_size
        if segment.kind is SegmentKind.ISOLATED:
            assert segment.span is not None and spans.keys is not None
            origin = spans.layout.spans[segment.span].start // self._block_size
            for offset, block in spans.heads.items():
                if first <= origin + offset < last:
                    self._tables.publish(block, spans.keys.span_keys[segment.span][offset])
            for run_start, run_end in runs(
                index for index in range(first, last) if index - origin not in spans.heads
            ):
                self._tables.publish_table(request, run_start, run_end)
        else:
            self._tables.publish_table(request, first, last)

    def _open_span(self, request: Request, spans: RequestSpans, stats: SpanStats) -> bool:
        """Get hold of the isolated KV under a span's gap, which its cold blocks attend to.

        Cached head blocks are held; missing ones get a block and are computed first. What is cached is looked up
        here and not in the plan: many steps may lie between the two.

        Returns:
            False when blocks are short; nothing has changed then.
        """
        self._close_span(spans)
        index = spans.todo[-1].span
        assert index is not None and spans.keys is not None
        span, size = spans.layout.spans[index], self._block_size
        first = span.start // size
        mine = [s for s in spans.todo if s.kind is SegmentKind.ISOLATED and s.span == index]
        heads = {
            block - first
            for start, end in spans.policy.gaps(span)
            for block in range(start // size, end // size)
        }
        cold = {
            block - first
            for segment in mine
            for block in range(segment.start // size, segment.end // size)
        }
        needed = {offset for offset in heads if offset < max(cold - heads)}
        held = {}
        for offset in needed:
            block = self._tables.find(spans.keys.span_keys[index][offset])
            if block is not None:
                held[offset] = block
        self._tables.hold(list(held.values()))
        missing = sorted(needed - held.keys())
        taken = self._tables.take(len(missing))
        if taken is None:
            self._tables.release(list(held.values()))
            return False
        spans.open_span = index
        spans.heads = held | dict(zip(missing, taken, strict=True))
        stats.count_heads(len(missing) * size)
        todo = (cold - heads) | set(missing)
        rest = [s for s in spans.todo if s not in mine]
        renewed = [
            Segment(SegmentKind.ISOLATED, (first + start) * size, (first + end) * size, index)
            for start, end in runs(sorted(todo))
        ]
        spans.todo = rest + renewed[::-1]
        spans.offset = spans.todo[-1].start
        return True

    def _close_span(self, spans: RequestSpans) -> None:
        self._released.extend(spans.heads.values())
        spans.heads = {}
        spans.open_span = None
