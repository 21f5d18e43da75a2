"""The invariants of the design on real engines, before any timing.

Every comparison is over forced steps (``benchmarks.forced_steps``) and is judged by what stock vLLM shows against
itself: a request alone and in a batch, a token prefilled and decoded and, where the variant has one, two stock engines.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.correctness_cases import Cases, random_cases, text_cases
from benchmarks.correctness_check import FLOORS, Check
from benchmarks.engine_options import EngineOptions, Variant, on_cpu
from benchmarks.engine_process import SPANS, STOCK, EngineProcess, Request
from benchmarks.forced_steps import (
    Answers,
    Texts,
    decoded,
    forced,
    forced_in_pairs,
    greedy,
    salted,
)
from benchmarks.report import say
from benchmarks.tiny_models import save_model
from benchmarks.workloads import unmarked


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
    baseline: Callable[[], contextlib.AbstractContextManager[EngineProcess]] | None = None,
) -> Reference:
    """All comparisons that two engines with enough room allow.

    Args:
        check: Takes the comparisons.
        stock: Stock vLLM.
        spans: vLLM with spans.
        cases: The prompts.
        steps: Steps of each prompt.
        baseline: Starts a second stock engine, if what it differs by is noise.
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
        with baseline() as other:
            check.noise("two stock engines", forced(other, plain, texts), alone, engines=True)

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
    warm, warmed = [], []
    for index, request in enumerate(spanned):
        # Warm by its neighbour alone: the same documents at other positions.
        salt = f"warm-{index}"
        spans.run(salted([spanned[index ^ 1]], salt))
        warmed += salted([request], salt)
        warm += forced(spans, warmed[-1:], own[index : index + 1])
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


def _with_policy(request: Request, policy: str) -> Request:
    return {**request, "extra_args": request["extra_args"] | {"span_gap_policy": policy}}


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

    def engine(self, name: str, options: EngineOptions) -> EngineProcess:
        """An engine of this run."""
        log = self.logs / f"correctness-{name}.log"
        setup = self.setup if name == SPANS else None
        return EngineProcess(name, log, options.arguments, options.environ, setup)


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
    dtype = "float32" if plan.cpu else "bfloat16"
    block = 32 if plan.cpu else 16
    if real_model is None:
        model = save_model(name, folder, dtype, small=plan.cpu)
        cases = random_cases(plan.prompts, block, most=5 if plan.cpu else 24)
    else:
        model, cases = real_model, text_cases(real_model, plan.prompts, block)
    options = _options(plan, variant, model, dtype, cases.longest + plan.steps + block)

    @contextlib.contextmanager
    def baseline() -> Any:
        with plan.engine(STOCK, options.plus(**(variant.baseline or {}))) as engine:
            yield engine

    check = Check(FLOORS[dtype])
    with plan.engine(STOCK, options) as stock:
        say(f"stock is up: {stock.info}")
        with plan.engine(SPANS, options) as spans:
            say(f"spans is up: {spans.info}")
            info = {engine.name: engine.info for engine in (stock, spans)}
            reference = compare(
                check, stock, spans, cases, plan.steps, baseline if variant.baseline else None
            )
    length = options.arguments["max_model_len"]
    for limit, arguments in {
        # Room for one request of the greatest length and the private blocks of its gaps, and for little besides.
        "a tiny cache": {"num_gpu_blocks_override": length // block * 5 // 4 + 8},
        "small budgets": {"max_num_batched_tokens": 8 * block, "max_num_seqs": 4},
    }.items():
        with plan.engine(SPANS, options.plus(**arguments)) as engine:
            say(f"spans with {limit} is up: {engine.info}")
            compare_in_little_room(check, limit, engine, cases, reference)
    return check.result() | {"engines": info, "arguments": options.arguments}


def _options(plan: Plan, variant: Variant, model: Path, dtype: str, longest: int) -> EngineOptions:
    base = on_cpu(threads=1) if plan.cpu else variant.execution
    block = 32 if plan.cpu else 16
    options = base.plus(
        model=str(model),
        dtype=dtype,
        max_model_len=-(-longest // block) * block,
        seed=0,
        **variant.arguments,
    )
    return options if plan.cpu else options.plus(gpu_memory_utilization=0.2)
