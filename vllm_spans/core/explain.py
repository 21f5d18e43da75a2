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
    lora: list[str] | None,
) -> dict[str, Any]:
    """Plan a request against the present cache.

    Args:
        core: Engine core; read only, no block is touched.
        token_ids: The prompt, pads included.
        extra_args: Span arguments of the request.
        cache_salt: Its tenant.
        lora: Name and path of its LoRA adapter, which vLLM keys blocks by.

    Returns:
        ``pieces``: ``kind`` (``prefix``, ``plus``, ``cross``), ``start``, ``end``, ``cached_tokens`` of each;
        ``kv_bytes_per_token``: bytes that all workers together keep of a token; ``kv_cache_tokens``: tokens that
        the KV cache holds; ``plan``: token counts of the plan, for a request with spans.

    Raises:
        SpanLayoutError: The span arguments cannot be served.
    """
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    scheduler: Any = core.scheduler
    request = Request(
        request_id="vllm-spans-explain",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra_args or None),
        pooling_params=None,
        cache_salt=cache_salt,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
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
    result: dict[str, Any] = {"pieces": pieces, "block_size": size, **_kv_cache_size(core)}
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


def _kv_cache_size(core: EngineCore) -> dict[str, int]:
    scheduler: Any = core.scheduler
    config, size = scheduler.kv_cache_config, scheduler.block_size
    workers = core.vllm_config.parallel_config.tensor_parallel_size
    block_bytes = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    # vLLM keeps one block for itself.
    return {
        "kv_bytes_per_token": block_bytes * workers // size,
        "kv_cache_tokens": (config.num_blocks - 1) * size,
    }
