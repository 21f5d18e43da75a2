"""The scheduler's own time per step: vLLM's class against the one with spans.

Real schedulers, requests and KV cache managers; only the model is left out: every running request
gets one token a step, as from a decode step.
"""

import gc
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import row, say

GOAL = 1 / 1.10  # at most 10 % more time than stock
_BLOCK_SIZE = 32
_BLOCKS = 20_000
_DOCUMENTS, _DOCUMENT_TOKENS = 4, 64


class Steps:
    """A scheduler with running requests, driven step by step.

    Args:
        spans: Use the scheduler class with spans.
        mark: Mark the documents of every request as spans.
        running: How many requests run.
        model: Folder of a model, for its configuration only.
    """

    def __init__(self, spans: bool, mark: bool, running: int, model: Path) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        config = _engine_config(model, spans, running)
        self._hasher = _block_hasher(config, spans)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=_kv_cache_config(),
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK_SIZE,
            hash_block_size=_BLOCK_SIZE,
            log_stats=True,
        )
        generator = random.Random(0)
        documents = [_tokens(generator, _DOCUMENT_TOKENS) for _ in range(8)]
        for number in range(running):
            self._add(f"request-{number}", generator, documents, mark)
        while len(self.scheduler.running) < running or self._prefilling():
            self.step()

    def _add(
        self, name: str, generator: random.Random, documents: list[list[int]], mark: bool
    ) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        tokens = _tokens(generator, _BLOCK_SIZE)
        starts = []
        for document in generator.sample(documents, _DOCUMENTS):
            starts.append(len(tokens))
            tokens += document
        extra_args = {"span_starts": starts, "cross_span_starts": [len(tokens)]}
        params = SamplingParams(
            max_tokens=8_000, ignore_eos=True, extra_args=extra_args if mark else None
        )
        tokens += _tokens(generator, 40)
        request = Request(name, tokens, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def _prefilling(self) -> bool:
        return any(request.num_output_tokens == 0 for request in self.scheduler.running)

    def step(self) -> float:
        """Run one step; returns the seconds of the scheduler, without the simulated model."""
        begin = time.perf_counter()
        scheduled = self.scheduler.schedule()
        between = time.perf_counter()
        result = self._simulate(scheduled)
        resume = time.perf_counter()
        self.scheduler.update_from_output(scheduled, result)
        return (between - begin) + (time.perf_counter() - resume)

    def _simulate(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            # A row, or a part of a prefill, samples nothing.
            done = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
        return ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)


def measure(model: Path, sizes: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Measure the schedulers in turn, one step each.

    Args:
        model: Folder of a model, for its configuration only.
        sizes: Numbers of running requests.
        steps: Steps of each scheduler; the median counts.

    Returns:
        Rows of the result file, in microseconds a step.
    """
    rows = []
    for running in sizes:
        kinds = {
            "stock": Steps(False, False, running, model),
            "without spans": Steps(True, False, running, model),
            "with spans": Steps(True, True, running, model),
        }
        median = _interleaved(kinds, steps)
        line = ", ".join(f"{name} {value:.0f}" for name, value in median.items())
        say(f"scheduler, {running} running requests, microseconds a step: {line}")
        rows += [_row(running, name, median) for name in ("without spans", "with spans")]
    return rows


def _interleaved(kinds: dict[str, Steps], steps: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    order = list(kinds)
    gc.collect()
    gc.disable()  # a collection would be charged to whoever runs just then
    try:
        for number in range(steps + 20):
            order.append(order.pop(0))
            for name in order:
                seconds = kinds[name].step()
                if number >= 20:
                    taken[name].append(seconds * 1e6)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in taken.items()}


def _row(running: int, name: str, median: dict[str, float]) -> dict[str, Any]:
    work = f"scheduler, one decode step of {running} running requests {name}"
    return row(work, median["stock"], median[name], "us", goal=GOAL)


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(100, 40_000) for _ in range(count)]


def _engine_config(model: Path, spans: bool, running: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=_BLOCK_SIZE,
        max_model_len=8192,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=_BLOCKS,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = _BLOCKS
    if spans:
        from vllm_spans.config import SpansConfig
        from vllm_spans.patches.engine import install_into

        install_into(config, SpansConfig())
    return config


def _block_hasher(config: Any, spans: bool) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    stock = get_request_block_hasher(_BLOCK_SIZE, hash_function)
    if not spans:
        return stock
    from vllm_spans.config import SpansConfig
    from vllm_spans.core.request_spans import SpanHasher

    settings = SpansConfig.from_vllm_config(config)
    return SpanHasher(stock, _BLOCK_SIZE, hash_function, settings, "benchmark")


def _kv_cache_config() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=_BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32
    )
    return KVCacheConfig(_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
