"""What the scheduler counts about spans between two reports."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vllm_spans.metrics.top_spans import TopSpans

if TYPE_CHECKING:
    from vllm_spans.core.plan import ReusePlan, SegmentKind
    from vllm_spans.core.request_spans import RequestSpans


HOT_SPANS = "hot_span_requests"
DIGITS = 12
"""Hexadecimal digits of a span's key that stand for it on ``/metrics``."""


class SpanStats:
    """Increments and gauges by name; names with a label are written ``name/label``.

    ``lookup = reused + isolated`` holds for every report: the three are counted together, once per request, when
    it is first admitted. A re-plan after a preemption is not counted again.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}
        self._hot = TopSpans()

    def count_plan(self, spans: RequestSpans) -> None:
        """Count an admitted plan, the first time."""
        if spans.counted or spans.plan is None:
            return
        spans.counted = True
        plan = spans.plan
        self._counts[f"requests/{_outcome(plan)}"] += 1
        self._counts["lookup_tokens"] += plan.lookup_tokens
        for tier, tokens in spans.loaded_tokens.items():
            self._counts[f"reused_tokens/{tier}"] += tokens
        self._counts["reused_tokens/gpu"] += plan.reused_tokens - sum(spans.loaded_tokens.values())
        self._counts["isolated_tokens"] += plan.isolated_tokens
        self._counts[f"gap_tokens/{spans.policy.name}"] += plan.gap_tokens
        self._count_prompt(spans)
        if spans.keys is not None:
            # The key of a span's last block stands for all of it. A span may come twice in a prompt.
            self._hot.add({keys[-1] for keys in spans.keys.span_keys})

    def count_full(self, spans: RequestSpans, num_cached_tokens: int) -> None:
        """Count an admitted request under policy ``full``: span tokens past the prefix hit are recomputed."""
        if spans.counted:
            return
        spans.counted = True
        self._counts["requests/full"] += 1
        self._counts["gap_tokens/full"] += sum(
            span.end - max(span.start, num_cached_tokens)
            for span in spans.layout.spans
            if span.end > num_cached_tokens
        )
        self._count_prompt(spans)

    def _count_prompt(self, spans: RequestSpans) -> None:
        self._counts["prompt_tokens"] += spans.prompt_tokens
        self._counts["pad_tokens"] += spans.pad_tokens

    def count_load_failures(self, reason: str, blocks: int) -> None:
        """Count blocks that a tier was thought to hold and could not give."""
        self._counts[f"load_failures/{reason}"] += blocks

    def count_declined(self, tier: str, blocks: int) -> None:
        """Count blocks that a tier holds and that are computed, since that is faster."""
        self._counts[f"declined_loads/{tier}"] += blocks

    def count_store_failures(self, reason: str, blocks: int) -> None:
        """Count blocks that a tier could not take."""
        self._counts[f"store_failures/{reason}"] += blocks

    def count_stored(self, tier: str, blocks: int) -> None:
        """Count blocks that a tier has taken."""
        self._counts[f"stored_blocks/{tier}"] += blocks

    def show_cpu_memory(self, blocks: int, capacity: int) -> None:
        """Report how full the tier in CPU memory is; what has not changed is not reported again."""
        now = {"cpu_memory_blocks": blocks, "cpu_memory_capacity_blocks": capacity}
        for name, value in now.items():
            if self._gauges.get(name) != value:
                self._counts[name] = self._gauges[name] = value

    def count_segment(self, kind: SegmentKind) -> None:
        """Count a segment whose last token is scheduled."""
        self._counts[f"segments/{kind.value}"] += 1

    def count_heads(self, tokens: int) -> None:
        """Count tokens under a gap that are computed in isolation for the blocks behind them."""
        self._counts["isolated_head_tokens"] += tokens

    def take(self) -> dict[str, int] | None:
        """Increments, and gauges that changed, since the last call; ``None`` when there are none.

        The hot spans are all there when one of them changed.
        """
        counts, hot = dict(self._counts), self._hot.take()
        self._counts.clear()
        if hot is not None:
            # An empty name tells that there are none any more.
            named = {f"{HOT_SPANS}/{key.hex()[:DIGITS]}": number for key, number in hot.items()}
            counts.update(named or {f"{HOT_SPANS}/": 0})
        return counts or None


def _outcome(plan: ReusePlan) -> str:
    if not plan.lookup_tokens:
        return "gaps_only"
    if not plan.isolated_tokens:
        return "warm"
    return "partial" if plan.reused_tokens else "cold"
