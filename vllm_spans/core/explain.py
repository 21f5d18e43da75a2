"""What is cached of a request, without running it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from vllm_spans.core.plan import make_plan

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def explain_request(
    core: EngineCore,
    token_ids: list[int],
    extra_args: dict[str, Any] | None,
    cache_salt: str | None,
    lora_name: str | None,
) -> dict[str, Any]:
    """Plan a request against the present cache.

    Args:
        core: Engine core; read only, no block is touched.
        token_ids: The prompt, pads included.
        extra_args: Span arguments of the request.
        cache_salt: Its tenant.
        lora_name: Must be ``None``: an adapter is known by more than its name.

    Returns:
        ``pieces``: ``kind`` (``prefix``, ``plus``, ``cross``), ``start``, ``end``, ``cached_tokens`` of each;
        ``plan``: token counts of the plan, for a request with spans.

    Raises:
        SpanLayoutError: The span arguments cannot be served.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    scheduler: Any = core.scheduler
    request = Request(
        request_id="vllm-spans-explain",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra_args or None),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=core.request_block_hasher,
    )
    spans = getattr(request, "vllm_spans", None)
    size = scheduler.block_size
    cached = [scheduler.cached_block(key) is not None for key in request.block_hashes]
    borders = [0, len(token_ids)]
    starts: set[int] = set()
    if spans is not None:
        starts = {span.start for span in spans.layout.spans}
        borders += [*starts, *(span.end for span in spans.layout.spans), *spans.layout.cross_starts]
    edges = sorted(set(borders))
    prefix_end = spans.layout.prefix_end if spans is not None else len(token_ids)
    pieces = [
        {
            "kind": "plus" if start in starts else "prefix" if start < prefix_end else "cross",
            "start": start,
            "end": end,
            "cached_tokens": size * sum(cached[start // size : end // size]),
        }
        for start, end in itertools.pairwise(edges)
    ]
    result: dict[str, Any] = {"pieces": pieces, "block_size": size}
    if spans is not None and spans.keys is not None:
        plan = make_plan(
            spans.layout,
            spans.policy,
            size,
            len(token_ids),
            [*cached, False],
            spans.keys.span_keys,
            lambda key: scheduler.cached_block(key) is not None,
        )
        result["plan"] = {
            "gap_policy": spans.policy.name,
            "gap_length": spans.policy.gap_length,
            "reused_tokens": plan.reused_tokens,
            "isolated_tokens": plan.isolated_tokens,
            "gap_tokens": plan.gap_tokens,
            "cached_tokens": plan.cached_tokens,
            "segments": len(plan.segments),
        }
    return result
