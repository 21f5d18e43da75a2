"""The invariants of the design on real engines, before any timing.

Every comparison is over forced steps (``benchmarks.forced_steps``) and is judged by what stock vLLM shows against
itself: a request alone and in a batch, a token prefilled and decoded and, where the variant has one, two stock engines.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.correctness_cases import POLICIES, Cases, random_cases, text_cases
from benchmarks.correctness_check import FLOORS, Check
from benchmarks.engine_options import EngineOptions, Variant, on_cpu
from benchmarks.engine_process import SPANS, STOCK, EngineProcess, Request, running
from benchmarks.forced_steps import (
    Answers,
    Texts,
    decoded,
    forced,
    forced_in_pairs,
    greedy,
    salted,
)
from benchmarks.tier_engine import forget, tiers_config, wait_written
from benchmarks.tiny_models import save_model
from benchmarks.workloads import unmarked

KV_BYTES = 2 << 30
"""KV cache of an engine on a GPU."""


@dataclasses.dataclass
class Reference:
    """What engines with little room are compared with: cold answers, each alone."""

    texts: Texts
    cold: Answers


def compare(
    check: Check,
    stock: EngineProcess,
    spans: EngineProcess,
    cases: Cases,
    steps: int,
    baseline: EngineProcess | None = None,
) -> Reference:
    """All comparisons that two engines with enough room allow.

    Args:
        check: Takes the comparisons.
        stock: Stock vLLM.
        spans: vLLM with spans.
        cases: The prompts.
        steps: Steps of each prompt.
        baseline: A second stock engine, not yet started, if what it differs by is noise.
    """
    plain, spanned = cases.plain, cases.spanned
    ordinary = [unmarked(request) for request in spanned]
    full = [_with_policy(request, "full") for request in spanned]

    texts, stock_decoded = greedy(stock, plain, steps)
    alone = forced(stock, plain, texts)
    check.noise("stock in a batch / alone", forced(stock, plain, texts, together=None), alone)
    check.noise("stock decoding / prefilling", stock_decoded, alone)
    batch = decoded(stock, plain, texts, together=None)
    check.noise("stock decoding in a batch / alone", batch, stock_decoded)
    span_texts, oracle_decoded = greedy(stock, ordinary, steps)
    oracle = forced(stock, ordinary, span_texts)
    batch = forced(stock, ordinary, span_texts, together=None)
    check.noise("stock in a batch / alone, documents", batch, oracle)
    if baseline is not None:
        with baseline as second:
            check.noise("two stock engines", forced(second, plain, texts), alone, engines=True)

    # Ordinary requests, and the policy `full`.
    check.like_stock("no spans / stock", forced(spans, plain, texts), alone)
    batch = forced(spans, plain, texts, together=None)
    check.like_stock("no spans in a batch / stock alone", batch, alone)
    check.like_stock(
        "no spans, decoding / stock decoding", decoded(spans, plain, texts), stock_decoded
    )
    batch = decoded(spans, plain, texts, together=None)
    check.like_stock("no spans, decoding in a batch / stock decoding", batch, stock_decoded)
    check.like_stock("policy full / stock", forced(spans, full, span_texts), oracle)
    batch = decoded(spans, full, span_texts, together=None)
    check.like_stock("policy full, decoding in a batch / stock decoding", batch, oracle_decoded)

    # Spans: the answer does not depend on the cache. Their own text, since the policies answer otherwise than stock.
    own, cold_decoded = greedy(spans, spanned, steps, cold=True)
    cold = forced(spans, spanned, own, cold=True)
    check.cached("cold", cold, some=False)
    check.unchanged("spans cold, decoding / prefilling", cold_decoded, cold)
    batch = forced(spans, spanned, own, together=None, cold=True)
    check.unchanged("spans cold in a batch / cold", batch, cold)
    pairs = forced_in_pairs(spans, spanned, own)
    check.unchanged("one span at two positions at once / cold", pairs, cold)
    warmed = [{**request, "salt": f"warm-{index}"} for index, request in enumerate(spanned)]
    for index, request in enumerate(warmed):
        # Warm by its neighbour alone: the same documents at other positions.
        spans.run(salted([spanned[index ^ 1]], request["salt"]))
    warm = forced(spans, warmed, own)
    check.cached("warm", warm, some=True)
    check.unchanged("spans warm / cold", warm, cold)
    batch = forced(spans, warmed, own, together=None)
    check.unchanged("spans warm in a batch / cold", batch, cold)
    batch = decoded(spans, warmed, own, together=None)
    check.unchanged("spans warm, decoding in a batch / cold", batch, cold_decoded)

    # Approximate KV of the same tokens lies in the cache now, and must not be used.
    plain_after = [unmarked(request) for request in warmed]
    full_after = [_with_policy(request, "full") for request in warmed]
    after = forced(spans, plain_after, span_texts)
    check.like_stock("no spans after spans / stock", after, oracle)
    after = forced(spans, full_after, span_texts)
    check.like_stock("policy full after spans / stock", after, oracle)
    exact = [{**request, "salt": f"exact-{index}"} for index, request in enumerate(spanned)]
    spans.run([unmarked(request) for request in exact])
    check.unchanged("spans after no spans / cold", forced(spans, exact, own), cold)
    other = [_with_policy(request, _other_policy(request)) for request in warmed]
    check.unchanged(
        "spans under the other policy after spans / cold",
        forced(spans, other, own),
        forced(spans, other, own, cold=True),
    )
    approximate = forced(spans, spanned, span_texts)
    check.different("legolink and none / stock", approximate, oracle)
    return Reference(own, cold)


def compare_in_little_room(
    check: Check,
    name: str,
    engine: EngineProcess,
    cases: Cases,
    reference: Reference,
) -> None:
    """Answers of an engine with a small cache or small budgets, twice: what was cached goes and comes."""
    for again in ("", ", again"):
        batch = forced(engine, cases.spanned, reference.texts, together=None)
        check.unchanged(f"{name}{again} / cold", batch, reference.cold)


def compare_limited(
    plan: Plan, options: EngineOptions, check: Check, cases: Cases, reference: Reference
) -> None:
    """Comparisons of engines that have to evict, to split work over steps, or to gather in several passes."""
    block = plan.block
    length = options.arguments["max_model_len"]
    limits = {
        # Room for one request of the greatest length and the private blocks of its gaps, and for little besides.
        "a tiny cache": options.plus(num_gpu_blocks_override=length // block * 5 // 4 + 8),
        "small budgets": options.plus(max_num_batched_tokens=8 * block, max_num_seqs=4),
    }
    if not plan.cpu:
        limits["a small scratch cache"] = options.within(VLLM_V1_SPANS_SCRATCH_TOKENS=str(length))
    limited = [plan.engine(SPANS, each, name) for name, each in limits.items()]
    with running(*limited, at_once=True):
        for limit, engine in zip(limits, limited, strict=True):
            compare_in_little_room(check, limit, engine, cases, reference)


def compare_over_tiers(
    plan: Plan,
    options: EngineOptions,
    check: Check,
    cases: Cases,
    reference: Reference,
    files: Path,
) -> None:
    """Comparisons of an engine with CPU memory and files behind a small KV cache.

    Args:
        files: Folder of its file tier.
    """
    length = options.arguments["max_model_len"]
    small = options.plus(
        num_gpu_blocks_override=length // plan.block * 5 // 4 + 8,
        kv_transfer_config=tiers_config("256MiB", files),
    )
    with running(plan.engine(SPANS, small, "tiers"), at_once=True) as (engine,):
        compare_in_little_room(check, "tiers behind a small cache", engine, cases, reference)
        for tier in ("cpu memory", "files"):
            wait_written(files)
            forget(engine, connector=tier == "files")
            loaded = forced(engine, cases.spanned, reference.texts)
            check.cached(f"from {tier}", loaded, some=True)
            check.unchanged(f"from {tier} / cold", loaded, reference.cold)


def _with_policy(request: Request, policy: str) -> Request:
    return {**request, "extra_args": request["extra_args"] | {"span_gap_policy": policy}}


def _other_policy(request: Request) -> str:
    return next(name for name in POLICIES if name != request["extra_args"]["span_gap_policy"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a correctness run is made.

    Attributes:
        logs: Folder of the engines' logs.
        cpu: Run on a CPU with a model of two layers.
        prompts: Requests of either kind, an even number.
        steps: Steps of each.
        setup: ``module:function`` that each engine with spans calls before it loads; for tests.
    """

    logs: Path
    cpu: bool
    prompts: int
    steps: int
    setup: str | None = None

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return "float32" if self.cpu else "bfloat16"

    @property
    def block(self) -> int:
        """Tokens of a KV block."""
        return 32 if self.cpu else 16

    def engine(self, name: str, options: EngineOptions, label: str | None = None) -> EngineProcess:
        """An engine of this run, not yet started."""
        setup = self.setup if name == SPANS else None
        label = f"correctness {label or name}"
        return EngineProcess(
            name, self.logs, options.arguments, options.environ, setup, label=label
        )


def check_variant(
    plan: Plan, variant: Variant, name: str, folder: Path, real_model: Path | None = None
) -> dict[str, Any]:
    """Compare the engines of one variant on one model.

    Args:
        plan: The run.
        variant: The kind of engine.
        name: A tiny model, unless there is a real one.
        folder: For a tiny model.
        real_model: Folder of a model with its tokenizer.

    Returns:
        ``ok``, the names of what failed, the noise and every comparison.
    """
    block = plan.block
    if real_model is None:
        model = save_model(name, folder, plan.dtype, small=plan.cpu)
        cases = random_cases(plan.prompts, block, most=5 if plan.cpu else 24)
    else:
        model, cases = real_model, text_cases(real_model, plan.prompts, block)
    options = engine_options(plan, variant, model, cases.longest + plan.steps + block)

    baseline = None
    if variant.baseline is not None:
        baseline = plan.engine(STOCK, options.plus(**variant.baseline), "second stock")
    check = Check(FLOORS[plan.dtype])
    stock, spans = plan.engine(STOCK, options), plan.engine(SPANS, options)
    with running(stock, spans, at_once=True):
        info = {engine.name: engine.info for engine in (stock, spans)}
        reference = compare(check, stock, spans, cases, plan.steps, baseline)
    if variant.little_room:
        compare_limited(plan, options, check, cases, reference)
    if variant.tiers:
        compare_over_tiers(plan, options, check, cases, reference, folder / f"{name}-files")
    return check.result() | {"engines": info, **options.described()}


def engine_options(plan: Plan, variant: Variant, model: Path, longest: int) -> EngineOptions:
    """Of both engines.

    Args:
        plan: The run.
        variant: The kind of engine.
        model: Folder of the model.
        longest: Most tokens of a request.
    """
    options = on_cpu(threads=1) if plan.cpu else variant.execution
    options = options.plus(
        model=str(model),
        dtype=plan.dtype,
        max_model_len=-(-longest // plan.block) * plan.block,
        seed=0,
        **variant.arguments,
    )
    if plan.cpu:
        return options
    # A stated size needs no look at the memory that is free, which engines that start at once take from each other.
    return options.plus(gpu_memory_utilization=0.05, kv_cache_memory_bytes=KV_BYTES)
