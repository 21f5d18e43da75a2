"""Mechanisms of the engine switched off one at a time, inside an engine process.

A test that still passes without the mechanism it is about proves nothing; ``test_mechanisms`` runs them against these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Patch = tuple[Any, str, Any]


def apply(worker: Any, name: str) -> None:
    """Switch one mechanism off.

    Args:
        worker: The engine process.
        name: One of :data:`FAULTS`.
    """
    worker.patches = []
    for owner, attribute, value in FAULTS[name](worker):
        worker.patches.append((owner, attribute, vars(owner)[attribute]))
        setattr(owner, attribute, value)


def restore(worker: Any) -> None:
    """Switch it on again."""
    for owner, attribute, value in reversed(worker.patches):
        setattr(owner, attribute, value)
    worker.patches = []


def _no_gap_rows(worker: Any) -> list[Patch]:
    """Gaps get their private blocks, but nothing computes them."""
    from vllm_spans.core import scheduler as module

    stock = module.add_rows

    def add_rows(output: Any, rows: Any, *args: Any, **kwargs: Any) -> None:
        kept = [row for row in rows if not row.group.startswith("@")]
        dropped = {row.row_id for row in rows} - {row.row_id for row in kept}
        worker.scheduler.finished_req_ids -= dropped
        stock(output, kept, *args, **kwargs)

    return [(module, "add_rows", add_rows)]


def _gaps_in_shared_blocks(worker: Any) -> list[Patch]:
    """Gap KV is written into the block that holds the span's isolated KV."""
    from vllm_spans.core.block_tables import SpanBlockTables

    stock = SpanBlockTables.admit

    def admit(self: Any, request: Any, plan: Any, hits: Any, keep_free: int) -> bool:
        if not stock(self, request, plan, hits, keep_free):
            return False
        table, spans = self.table(request), request.vllm_spans
        for span, keys in zip(spans.layout.spans, spans.keys.span_keys, strict=True):
            for start, end in spans.policy.gaps(span):
                for index in range(start // self.block_size, end // self.block_size):
                    shared = self.find(keys[index - span.start // self.block_size])
                    if shared is not None and not plan.hits[index]:
                        self.hold([shared])
                        self.release([table[index]])
                        table[index] = shared
        return True

    return [(SpanBlockTables, "admit", admit)]


def _cold_spans_in_context(worker: Any) -> list[Patch]:
    """A cold span is computed where it stands, and its contextual KV is published under its own key."""
    from vllm_spans.core.plan import SegmentKind
    from vllm_spans.core.preparation import Preparation
    from vllm_spans.core.rows import contextual_group

    stock = Preparation._make_row

    def make_row(self: Any, request: Any, spans: Any, segment: Any, end: int) -> Any:
        row = stock(self, request, spans, segment, end)
        if segment.kind is not SegmentKind.ISOLATED:
            return row
        return dataclasses.replace(
            row,
            group=contextual_group(request.request_id),
            origin=0,
            table=self._tables.table(request),
            start=spans.offset,
            end=end,
        )

    return [(Preparation, "_make_row", make_row)]


def _no_salt_in_span_roots(worker: Any) -> list[Patch]:
    """Salt and LoRA enter block 0 only, as in stock vLLM."""
    from vllm_spans.core import request_spans as module

    stock = module.make_span_root
    return [(module, "make_span_root", lambda hash_fn, tenant, model: stock(hash_fn, None, model))]


def _lookup_ends_at_a_hole(worker: Any) -> list[Patch]:
    """The first cold block of a span ends the lookup of all later ones."""
    from vllm_spans.core import scheduler as module

    stock = module.make_plan

    def make_plan(
        layout: Any, policy: Any, size: int, count: int, hits: list[bool], *rest: Any
    ) -> Any:
        gaps = {
            i for s in layout.spans for a, b in policy.gaps(s) for i in range(a // size, b // size)
        }
        body = [
            index
            for span in layout.spans
            for index in range(span.start // size, span.end // size)
            if index not in gaps
        ]
        seen = list(hits)
        hole = next((index for index in body if not seen[index]), len(seen))
        for index in body:
            seen[index] = seen[index] and index < hole
        return stock(layout, policy, size, count, seen, *rest)

    return [(module, "make_plan", make_plan)]


def _no_rotation(worker: Any) -> list[Patch]:
    """K is attended to as it lies in the cache."""
    from vllm_spans.attention.rotary import LayerRotary

    return [(LayerRotary, "rotate", lambda self, key, positions: None)]


def _rotation_off_by_a_block(worker: Any) -> list[Patch]:
    """K of later blocks is rotated to a place one block before its own."""
    from vllm_spans.attention.rotary import LayerRotary

    stock = LayerRotary.rotate

    def rotate(self: Any, key: Any, positions: Any) -> None:
        stock(self, key, (positions - 32).clamp(min=0))

    return [(LayerRotary, "rotate", rotate)]


def _layout_not_in_exact_chain(worker: Any) -> list[Patch]:
    """What stands after a span has the key that it would have without spans."""
    from vllm_spans.core.hashing import RequestKeys

    def enter_span(self: Any, tokens: Any) -> list[Any]:
        span, size = self._layout.spans[self._next_span], self._block_size
        span_keys = self._memo.keys(self._span_root, tokens[span.start : span.end])
        gap = {i for a, b in self._policy.gaps(span) for i in range(a, b, size)}
        keys = []
        for start, span_key in zip(range(span.start, span.end, size), span_keys, strict=True):
            self._exact = self._hash_fn((self._exact, tuple(tokens[start : start + size]), None))
            keys.append(self._exact if start in gap else span_key)
            self.is_span_key.append(start not in gap)
        self.span_keys.append(span_keys)
        self._next_span += 1
        self._num_blocks += len(span_keys)
        return keys

    return [(RequestKeys, "_enter_span", enter_span)]


def _full_is_not_full(worker: Any) -> list[Patch]:
    """The policy `full` is taken for one without gaps."""
    from vllm_spans.core.policy import GapPolicy

    return [(GapPolicy, "is_full", property(lambda self: False))]


def _no_plan_on_resume(worker: Any) -> list[Patch]:
    """A preempted request comes back as an ordinary one."""
    from vllm_spans.core.scheduler import SpanSchedulerMixin

    stock = SpanSchedulerMixin._free_request_blocks

    def free(self: Any, request: Any) -> None:
        stock(self, request)
        self._unplanned.discard(request.request_id)

    return [(SpanSchedulerMixin, "_free_request_blocks", free)]


def _blocks_are_not_released(worker: Any) -> list[Patch]:
    """The blocks under a gap are never given back."""
    from vllm_spans.core.block_tables import SpanBlockTables

    return [(SpanBlockTables, "release", lambda self, blocks: None)]


def _plan_made_by_the_cache_alone(worker: Any) -> list[Patch]:
    """Every block of a span counts as a hit under its key's prefix: a hole is read as it lies."""
    from vllm_spans.core.plan import SegmentKind
    from vllm_spans.core.preparation import Preparation

    stock = Preparation.begin

    def begin(self: Any, spans: Any, plan: Any) -> None:
        stock(self, spans, plan)
        spans.todo = [s for s in spans.todo if s.kind is not SegmentKind.ISOLATED]
        spans.offset = spans.todo[-1].start if spans.todo else 0

    return [(Preparation, "begin", begin)]


FAULTS: dict[str, Callable[[Any], list[Patch]]] = {
    "no gap rows": _no_gap_rows,
    "gaps in shared blocks": _gaps_in_shared_blocks,
    "cold spans in context": _cold_spans_in_context,
    "no isolated rows": _plan_made_by_the_cache_alone,
    "no salt in span roots": _no_salt_in_span_roots,
    "lookup ends at a hole": _lookup_ends_at_a_hole,
    "no rotation": _no_rotation,
    "rotation off by a block": _rotation_off_by_a_block,
    "layout not in exact chain": _layout_not_in_exact_chain,
    "full is not full": _full_is_not_full,
    "no plan on resume": _no_plan_on_resume,
    "blocks are not released": _blocks_are_not_released,
}
