"""What is cached of a request, without running it."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm_spans.core.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.engine.core import EngineCore


def explain_request(
    core: EngineCore,
    token_ids: list[int],
    extra_args: dict[str, Any] | None,
    cache_salt: str | None,
    lora: list[str] | None,
) -> Future[dict[str, Any]]:
    """Plan a request against the present cache and the tiers behind it.

    Args:
        core: Engine core; read only: no block is touched, nothing is pinned or read from a tier.
        token_ids: The prompt, pads included.
        extra_args: Span arguments of the request.
        cache_salt: Its tenant.
        lora: Name and path of its LoRA adapter, which vLLM keys blocks by.

    Returns:
        Ready when the tiers have answered. ``pieces``: ``kind`` (``prefix``, ``plus``, ``cross``), ``start``,
        ``end`` of each, ``cached_tokens`` that the KV cache holds of it, and ``tier_tokens``: what it does not hold
        and a tier does, by tier; ``tiers``: the names of the server's tiers;
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
    keys = list(request.block_hashes)
    cached = [scheduler.cached_block(key) is not None for key in keys]
    planned = spans.keys.span_keys if spans is not None and spans.keys is not None else []
    known = {key for span in planned for key in span if scheduler.cached_block(key) is not None}
    sizes = _kv_cache_size(core)
    tiers = scheduler.tiers
    names = list(tiers.names) if tiers is not None else []
    answer: Future[dict[str, Any]] = Future()
    borders = [0, len(token_ids)]
    starts: set[int] = set()
    if spans is not None:
        starts = {span.start for span in spans.layout.spans}
        borders += [*starts, *(span.end for span in spans.layout.spans), *spans.layout.cross_starts]
    edges = sorted(set(borders))
    prefix_end = spans.layout.prefix_end if spans is not None else len(token_ids)

    def describe(held: Mapping[bytes, str]) -> dict[str, Any]:
        # May run in another thread: nothing of the engine is looked at any more.
        where = ["gpu" if hit else held.get(key) for key, hit in zip(keys, cached, strict=True)]
        pieces = []
        for start, end in itertools.pairwise(edges):
            inside = where[start // size : end // size]
            pieces.append(
                {
                    "kind": "plus"
                    if start in starts
                    else "prefix"
                    if start < prefix_end
                    else "cross",
                    "start": start,
                    "end": end,
                    "cached_tokens": size * inside.count("gpu"),
                    "tier_tokens": {tier: size * inside.count(tier) for tier in names},
                }
            )
        result: dict[str, Any] = {
            "pieces": pieces,
            "block_size": size,
            "tiers": names,
            **sizes,
        }
        if spans is not None and spans.keys is not None:
            plan = make_plan(
                spans.layout,
                spans.policy,
                size,
                len(token_ids),
                [*cached, False],
                planned,
                known.__contains__,
                [place not in ("gpu", None) for place in where],
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

    def finish(held: Future[dict[bytes, str]]) -> None:
        try:
            answer.set_result(describe(held.result()))
        except Exception as error:
            answer.set_exception(error)

    missing = [key for key, hit in zip(keys, cached, strict=True) if not hit]
    if tiers is None or not missing:
        answer.set_result(describe({}))
    else:
        tiers.look(missing).add_done_callback(finish)
    return answer


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
