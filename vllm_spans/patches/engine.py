"""Patches of the engine: configuration, request keys, request checks, scheduler stats, ``explain``."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from vllm_spans.config import SpansConfig, setting_names
from vllm_spans.core.layout import SPAN_ARGS, SpanLayoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

logger = logging.getLogger(__name__)

_SMALLEST_BLOCK = {"cpu": 32, "cuda": 16}


PATCHED: list[str] = [
    "vllm.envs:environment_variables",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.v1.engine.core:init_none_hash",
    "vllm.v1.engine.core:get_request_block_hasher",
    "vllm.v1.engine.core:EngineCore.spans_explain",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.metrics.stats:SchedulerStats.spans",
    "vllm.v1.attention.backends.registry:_ATTN_OVERRIDES",
]
"""``module:attribute`` of each replaced or added symbol, as in ``vllm_spans.patches``."""


def apply() -> None:
    """Apply all patches of this module."""
    _register_environment()
    _extend_scheduler_stats()
    _patch_engine_config()
    _patch_exact_root()
    _patch_block_hasher()
    _patch_process_inputs()
    _add_explain()
    _register_attention()


def _register_environment() -> None:
    """``vllm.envs.environment_variables``: vLLM warns of, or refuses, a ``VLLM_`` name that it does not know."""
    import vllm.envs as envs

    for name in setting_names():
        envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))


def _patch_engine_config() -> None:
    """``EngineArgs.create_engine_config``: the only place that sees all flags before and the whole result after."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        from vllm.platforms import current_platform

        spans = SpansConfig.from_sources(os.environ, self.additional_config)
        if self.block_size is None:
            self.block_size = _SMALLEST_BLOCK.get(current_platform.device_type)  # type: ignore[assignment]
        if self.disable_hybrid_kv_cache_manager is None:
            # Later "not said" and "wanted" look the same. Without windows the manager has nothing to do.
            self.disable_hybrid_kv_cache_manager = True
        config = stock(self, *args, **kwargs)
        install_into(config, spans)
        return config

    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def install_into(config: VllmConfig, spans: SpansConfig) -> None:
    """Check a finished configuration and make its engine one with spans.

    Args:
        config: Changed in place.
        spans: Settings from the environment and ``additional_config``.

    Raises:
        GateError: The engine cannot run with spans.
        SpansConfigError: A setting does not fit the engine.
    """
    from vllm.platforms import current_platform

    from vllm_spans.attention.cuda_scratch import ScratchShape
    from vllm_spans.gate import check_config, has_windows

    check_config(config)
    spans = spans.resolve(config.cache_config.block_size)
    scheduler = config.scheduler_config
    name = "SpanAsyncScheduler" if scheduler.async_scheduling else "SpanScheduler"
    scheduler.scheduler_cls = f"vllm_spans.core.scheduler.{name}"
    config.parallel_config.worker_cls = _worker_class()
    if current_platform.is_cuda():
        backend = config.attention_config.backend or cuda_backend(config)
        config.attention_config.backend = backend
    if config.kv_transfer_config is not None:
        # vLLM's default ends a request whose load fails.
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
    assert isinstance(config.additional_config, dict)
    config.additional_config["spans"] = spans.to_dict()
    if current_platform.is_cuda():
        # Refuses a scratch cache that is too small now, not when the weights have been loaded.
        ScratchShape.of(config)
    logger.info(
        "spans are on: gap policy %s, gap length %s, block size %d",
        spans.gap_policy,
        spans.gap_length,
        config.cache_config.block_size,
    )
    if current_platform.is_cpu():
        _count_sinks_once(config)
    if has_windows(config):
        logger.info(
            "spans: the hybrid KV cache manager is off: blocks outside a sliding window are kept, since spans are "
            "read at other positions"
        )


def _count_sinks_once(config: VllmConfig) -> None:
    """Keep vLLM's CPU kernel from splitting a row between threads where layers have sinks.

    It counts the sink of a split that lies outside the window as well, once too often. Workers start after this.
    """
    import vllm.envs as envs

    from vllm_spans.gate import SINK_ARCHITECTURES

    if config.model_config.architecture in SINK_ARCHITECTURES and envs.VLLM_CPU_ATTN_SPLIT_KV:
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        logger.info(
            "spans: VLLM_CPU_ATTN_SPLIT_KV is set to 0: with attention sinks vLLM's CPU kernel answers wrongly "
            "where it splits a row between threads"
        )


def cuda_backend(config: VllmConfig) -> AttentionBackendEnum:
    """The backend that prefill runs on: FlashAttention wherever it can, being several times faster."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_spans.gate import SINK_ARCHITECTURES

    model = config.model_config
    reason = None
    if model.dtype.itemsize != 2:
        reason = f"takes float16 and bfloat16, not {model.dtype}"
    elif model.architecture in SINK_ARCHITECTURES and not current_platform.has_device_capability(
        90
    ):
        reason = "has attention sinks from Hopper on"
    if reason is None:
        return AttentionBackendEnum.FLASH_ATTN
    logger.warning(
        "spans: prefill runs on TRITON_ATTN, which is several times slower: FlashAttention %s",
        reason,
    )
    return AttentionBackendEnum.TRITON_ATTN


def _worker_class() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "vllm_spans.attention.worker.SpansCPUWorker"
    return "vllm_spans.attention.gpu_worker.SpansGPUWorker"


def _patch_exact_root() -> None:
    """``init_none_hash`` as the engine core sees it: the root of the exact chain says how the cache holds K.

    No key of an engine with spans equals one of a stock engine then, so that no store between the two, keyed by block
    hashes as vLLM's connectors are, gives un-rotated K to an engine that takes it for rotated.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core

    from vllm_spans.core.hashing import make_exact_root

    stock = core.init_none_hash

    @functools.wraps(stock)
    def init_none_hash(hash_fn: Callable[[Any], bytes]) -> None:
        stock(hash_fn)
        root = make_exact_root(hash_fn, kv_cache_utils.NONE_HASH)
        kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(root)

    core.init_none_hash = init_none_hash


def _patch_block_hasher() -> None:
    """``get_request_block_hasher`` as the engine core sees it: requests with spans get their own keys at once."""
    from vllm.v1.engine import core

    stock_factory = core.get_request_block_hasher

    @functools.wraps(stock_factory)
    def get_request_block_hasher(
        hash_block_size: int, caching_hash_fn: Callable[[Any], bytes]
    ) -> Callable[[Any], list[Any]]:
        from vllm_spans.core.identity import last_announced
        from vllm_spans.core.request_spans import SpanHasher

        stock = stock_factory(hash_block_size, caching_hash_fn)
        identity = last_announced()
        return SpanHasher(stock, hash_block_size, caching_hash_fn, identity.config, identity.model)

    core.get_request_block_hasher = get_request_block_hasher


def _patch_process_inputs() -> None:
    """``InputProcessor.process_inputs``: every request passes here before the engine core, where a bad layout
    would be too late to answer with an error of the request's own."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_spans.metrics import counters

    stock = InputProcessor.process_inputs

    @functools.wraps(stock)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = stock(self, *args, **kwargs)
        params = request.sampling_params
        if (
            params is not None
            and params.extra_args
            and not params.extra_args.keys().isdisjoint(SPAN_ARGS)
        ):
            try:
                check_request(request, self.vllm_config)
            except SpanLayoutError as error:
                counters.rejected(str(self.vllm_config.model_config.served_model_name), "engine")
                raise VLLMValidationError(str(error), parameter=error.param) from error
        return request

    InputProcessor.process_inputs = process_inputs  # type: ignore[method-assign]


def check_request(request: Any, config: VllmConfig) -> None:
    """Refuse a request whose spans the engine cannot serve.

    Args:
        request: An ``EngineCoreRequest``.
        config: Of the engine.

    Raises:
        SpanLayoutError: Names the part at fault.
    """
    from vllm_spans.core.request_spans import read_spans

    block_size = config.cache_config.block_size
    if request.prompt_token_ids is None:
        raise SpanLayoutError(
            "spans need a prompt of token ids, not of embeddings", "prompt_embeds"
        )
    num_tokens = len(request.prompt_token_ids)
    spans = read_spans(
        request.sampling_params.extra_args,
        num_tokens,
        block_size,
        SpansConfig.from_vllm_config(config),
    )
    if spans is None:
        return
    if request.sampling_params.prompt_logprobs is not None:
        raise SpanLayoutError(
            "prompt_logprobs are not available with spans: reused tokens are not computed",
            "prompt_logprobs",
        )
    if request.mm_features:
        raise SpanLayoutError("spans and multimodal inputs cannot be in one request", "messages")
    if request.resumable:
        raise SpanLayoutError("spans and streaming input cannot be in one request", "prompt")
    gaps = (end - start for span in spans.layout.spans for start, end in spans.policy.gaps(span))
    heads = max(gaps, default=0) // block_size
    have = config.cache_config.num_gpu_blocks
    need = -(-(num_tokens + 1) // block_size) + heads + 1
    if have and need > have:
        raise SpanLayoutError(
            f"the request needs {need} KV blocks of {block_size} tokens, the engine has {have}",
            "messages",
        )


def _extend_scheduler_stats() -> None:
    """``SchedulerStats.spans``: the counters' way from the engine core to ``/metrics``.

    The class itself is extended: msgspec decodes what the field's declared type names.
    """
    from vllm.v1.metrics import stats

    cls = stats.SchedulerStats
    if "spans" in cls.__dataclass_fields__:
        return
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            setattr(cls, field.name, dataclasses.field(default_factory=field.default_factory))
    cls.__annotations__["spans"] = dict[str, int] | None
    cls.spans = None  # type: ignore[attr-defined]
    dataclasses.dataclass(cls)


def _add_explain() -> None:
    """``EngineCore.spans_explain``: a utility call for the API server; vLLM has nothing of the kind.

    It answers with a future, as vLLM lets such calls do: steps go on while files are looked for.
    """
    from vllm.v1.engine.core import EngineCore

    def spans_explain(
        self: EngineCore,
        token_ids: list[int],
        extra_args: dict[str, Any] | None,
        cache_salt: str | None = None,
        lora: list[str] | None = None,
    ) -> Future[dict[str, Any]]:
        from vllm_spans.core.explain import explain_request

        return explain_request(self, token_ids, extra_args, cache_salt, lora)

    EngineCore.spans_explain = spans_explain  # type: ignore[attr-defined]


def _register_attention() -> None:
    """``CPU_ATTN``, ``FLASH_ATTN``, ``TRITON_ATTN``: vLLM's registry takes an override of a backend; the CPU platform
    always picks the first name, ``create_engine_config`` sees to it that CUDA picks one of the others."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "vllm_spans.attention.cpu_backend.SpansCPUAttentionBackend",
        )
    elif current_platform.is_cuda():
        module = "vllm_spans.attention.cuda_backends"
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{module}.SpansFlashAttentionBackend")
        register_backend(AttentionBackendEnum.TRITON_ATTN, f"{module}.SpansTritonAttentionBackend")
