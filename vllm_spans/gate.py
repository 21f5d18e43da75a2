"""The gate: what an engine with spans handles. Everything else is refused at start-up, by name, with the remedy."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_spans.config import ENABLED_ENV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED_VLLM = ("0.32.0",)

SUPPORTED_ARCHITECTURES = frozenset(
    {
        "Cohere2ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "InternLM2ForCausalLM",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "StableLmForCausalLM",
    }
)
"""Architectures whose attention rotates Q and K with one rotary module of vLLM right before the attention. Models that
vLLM runs on the code of ``transformers`` are not among them: that code rotates by itself."""

WINDOW_ARCHITECTURES = frozenset(
    {
        "Cohere2ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
    }
)
"""Of these, the ones verified with sliding windows."""


SINK_ARCHITECTURES = frozenset({"GptOssForCausalLM"})
"""Of these, the ones with attention sinks."""


class RopeLayers(Enum):
    """Which attention layers of an architecture rotate Q and K."""

    ALL = "all"
    WITH_MODULE = "those that have a rotary module"
    WITH_WINDOW = (
        "those that have a sliding window; the others have a rotary module that they do not use"
    )


_ROPE_LAYERS = {
    "Cohere2ForCausalLM": RopeLayers.WITH_WINDOW,
    "GraniteForCausalLM": RopeLayers.WITH_MODULE,
}


def rope_layers(architecture: str) -> RopeLayers:
    """Which attention layers of a supported architecture rotate."""
    return _ROPE_LAYERS.get(architecture, RopeLayers.ALL)


STOCK_WORKERS = ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")
"""What vLLM's own platforms choose as the worker; the workers with spans are subclasses of these."""


class GateError(ValueError):
    """The engine cannot run with spans; the text says why and what to change."""


def check_version(version: str) -> None:
    """Refuse a vLLM whose insides are not known.

    Raises:
        GateError: Another version than the pinned one.
    """
    if version.split("+")[0] not in SUPPORTED_VLLM:
        raise GateError(
            f"vllm_spans knows vLLM {', '.join(SUPPORTED_VLLM)}, this is {version}. Install vllm=="
            f"{SUPPORTED_VLLM[-1]} or unset {ENABLED_ENV}."
        )


def check_config(config: VllmConfig) -> None:
    """Refuse a model, feature or flag that spans do not handle.

    Args:
        config: The complete configuration of the engine.

    Raises:
        GateError: All that stands in the way, one line each.
    """
    reasons = [
        *_model_reasons(config),
        *_window_reasons(config),
        *_cache_reasons(config),
        *_feature_reasons(config),
        *_connector_reasons(config),
        *_platform_reasons(config),
    ]
    if reasons:
        raise GateError(
            "spans cannot be used with this engine:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
            + f"\nChange the above, or unset {ENABLED_ENV} to serve without spans."
        )


def _model_reasons(config: VllmConfig) -> list[str]:
    model = config.model_config
    reasons = []
    if model.runner_type != "generate":
        reasons.append(
            f"runner {model.runner_type!r}: spans need a generating model (--runner generate)"
        )
    if model.is_encoder_decoder:
        reasons.append("encoder-decoder model: spans need a decoder-only model")
    if model.use_mla:
        reasons.append(
            "multi-head latent attention (MLA): its cache holds no per-head K to leave un-rotated"
        )
    if model.has_inner_state or model.is_hybrid or model.is_attention_free:
        reasons.append(
            "state-space or hybrid model: its state cannot be reused at another position"
        )
    if model.uses_mrope:
        reasons.append("multimodal RoPE (mRoPE): positions are not one number per token")
    if model.is_multimodal_model:
        reasons.append(
            "multimodal model: serve the text-only checkpoint, or pass --language-model-only"
        )
    architecture = model.architecture
    if architecture not in SUPPORTED_ARCHITECTURES:
        reasons.append(
            f"architecture {architecture}: not among the verified ones ({', '.join(sorted(SUPPORTED_ARCHITECTURES))})"
        )
    if model.using_transformers_backend():
        reasons.append(
            "the Transformers modeling backend: it rotates Q and K out of vLLM's sight; drop --model-impl "
            "transformers, or use a model that vLLM implements itself"
        )
    known = ("default", "linear", "llama3", "yarn", "proportional")
    reasons += [
        f"RoPE of type {rope_type!r}: its rotation depends on more than the position"
        for rope_type in sorted(_rope_types(model.hf_text_config) - {*known})
    ]
    return reasons


def _rope_types(text_config: Any) -> set[str]:
    rope = (
        getattr(text_config, "rope_parameters", None)
        or getattr(text_config, "rope_scaling", None)
        or {}
    )
    # A model with a base of its own for layers with a window has parameters by layer type.
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", each.get("type", "default"))) for each in nested or [rope]}


def _window_reasons(config: VllmConfig) -> list[str]:
    model = config.model_config
    other = _layer_types(config) - {"full_attention", "sliding_attention"}
    if other or model.attention_chunk_size is not None:
        kinds = ", ".join(sorted(other)) or "chunked"
        return [f"attention layers of type {kinds}: spans handle full and sliding-window attention"]
    if not has_windows(config):
        return []
    reasons = []
    if model.architecture not in WINDOW_ARCHITECTURES:
        reasons.append(
            f"sliding windows of {model.architecture}: not among the verified ones "
            f"({', '.join(sorted(WINDOW_ARCHITECTURES))}); pass --disable-sliding-window, which ends every "
            "sequence at the window"
        )
    if not config.scheduler_config.disable_hybrid_kv_cache_manager:
        reasons.append(
            "the hybrid KV cache manager frees blocks outside the window, which spans read at other positions; "
            "drop --no-disable-hybrid-kv-cache-manager"
        )
    return reasons


def has_windows(config: VllmConfig) -> bool:
    """Whether a layer of the model has a sliding window."""
    if config.cache_config.sliding_window is not None:
        return True
    size = getattr(config.model_config.hf_text_config, "sliding_window", None)
    return size is not None and "sliding_attention" in _layer_types(config)


def _layer_types(config: VllmConfig) -> set[str]:
    return set(getattr(config.model_config.hf_text_config, "layer_types", None) or ())


def _cache_reasons(config: VllmConfig) -> list[str]:
    from vllm.platforms import current_platform

    from vllm_spans.attention.kv_dtype import KV_DTYPE_NAMES, UNQUANTISED_KV_DTYPES

    cache = config.cache_config
    reasons = []
    if not cache.enable_prefix_caching:
        reasons.append("prefix caching is off: drop --no-enable-prefix-caching")
    names = KV_DTYPE_NAMES if current_platform.is_cuda() else UNQUANTISED_KV_DTYPES
    if cache.cache_dtype not in names:
        reasons.append(
            f"--kv-cache-dtype {cache.cache_dtype}: spans handle {', '.join(names)} on this platform"
        )
    if cache.kv_cache_dtype_skip_layers:
        reasons.append(
            "--kv-cache-dtype-skip-layers: spans need one dtype in all layers; drop the flag"
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        reasons.append("--kv-sharing-fast-prefill: gaps need every layer's K and V; drop the flag")
    return reasons


def _feature_reasons(config: VllmConfig) -> list[str]:
    import vllm.envs as envs

    parallel, scheduler = config.parallel_config, config.scheduler_config
    reasons = []
    if scheduler.scheduler_cls is not None:
        reasons.append(
            f"--scheduler-cls {scheduler.scheduler_cls}: spans bring a scheduler; drop the flag"
        )
    if parallel.worker_cls not in STOCK_WORKERS:
        reasons.append(f"--worker-cls {parallel.worker_cls}: spans bring a worker; drop the flag")
    if config.speculative_config is not None:
        reasons.append(
            "speculative decoding: its drafter reads rotated K; drop --speculative-config"
        )
    if config.ec_transfer_config is not None:
        reasons.append("an encoder-cache connector; drop --ec-transfer-config")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        reasons.append(
            "context parallelism: blocks are sharded over ranks; set both context-parallel sizes to 1"
        )
    if parallel.pipeline_parallel_size > 1:
        reasons.append("pipeline parallelism: not verified; set --pipeline-parallel-size 1")
    if not scheduler.enable_chunked_prefill:
        reasons.append("chunked prefill is off: drop --no-enable-chunked-prefill")
    if config.model_config.enable_prompt_embeds:
        reasons.append("--enable-prompt-embeds: spans are keyed by token ids; drop the flag")
    fused = getattr(config.compilation_config.pass_config, "fuse_rope_kvcache", False)
    if fused:
        reasons.append(
            "the fused RoPE and KV-cache pass writes rotated K; set pass_config.fuse_rope_kvcache=false"
        )
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        reasons.append("vLLM's Rust front end bypasses the markup; unset VLLM_USE_RUST_FRONTEND")
    return reasons


OFFLOADING_CONNECTOR = ("SpansOffloadingConnector", "vllm_spans.offload.connector")
"""Name and module of the one KV connector that knows what the cache holds."""


def _connector_reasons(config: VllmConfig) -> list[str]:
    from vllm.platforms import current_platform

    from vllm_spans.offload.settings import OffloadSettings, OffloadSettingsError

    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    if (transfer.kv_connector, transfer.kv_connector_module_path) != OFFLOADING_CONNECTOR:
        name, module = OFFLOADING_CONNECTOR
        return [
            f"KV connector {transfer.kv_connector}: it would give un-rotated K to engines that take it for rotated; "
            f"use kv_connector {name} with kv_connector_module_path {module}, or drop --kv-transfer-config"
        ]
    try:
        settings = OffloadSettings.from_extra_config(transfer.kv_connector_extra_config)
    except OffloadSettingsError as error:
        return [str(error)]
    parallel = config.parallel_config
    reasons = []
    if transfer.kv_role != "kv_both":
        reasons.append(f"kv_role {transfer.kv_role}: the tiers are read and written; use kv_both")
    if not current_platform.is_cpu():
        reasons.append(
            "SpansOffloadingConnector on a GPU: its copies have not been verified there yet; drop "
            "--kv-transfer-config"
        )
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        reasons.append(
            "SpansOffloadingConnector with more than one worker: not verified; set the parallel sizes to 1"
        )
    if settings.files is not None:
        reasons += _file_tier_reasons(config)
    return reasons


def _file_tier_reasons(config: VllmConfig) -> list[str]:
    """What would let a file outlive what it was computed with."""
    from vllm_spans.offload.identity import WEIGHT_FORMATS

    reasons = []
    if config.lora_config is not None:
        reasons.append(
            "LoRA with a file tier: an adapter is known by its name alone, which says nothing of its weights after a "
            "restart; drop --enable-lora or files"
        )
    if config.model_config.enable_sleep_mode or config.weight_transfer_config is not None:
        reasons.append(
            "sleep mode or weight transfer with a file tier: weights could change under the files; drop "
            "--enable-sleep-mode and --weight-transfer-config, or files"
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in ("sha256", "sha256_cbor"):
        reasons.append(
            f"--prefix-caching-hash-algo {algorithm} with a file tier: files are trusted by key; use sha256"
        )
    if config.load_config.load_format not in WEIGHT_FORMATS:
        reasons.append(
            f"--load-format {config.load_config.load_format} with a file tier: its weights cannot be told apart; use "
            f"one of {', '.join(WEIGHT_FORMATS)}"
        )
    return reasons


def _platform_reasons(config: VllmConfig) -> list[str]:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():
        return []
    if not current_platform.is_cuda():
        return [f"platform {current_platform.device_type!r}: spans run on CPU and CUDA"]
    reasons = []
    if not current_platform.has_device_capability(80):
        reasons.append(
            "the GPU is older than Ampere (compute capability 8.0), which FlashAttention needs"
        )
    attention = config.attention_config
    supported = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)
    if attention.backend not in (None, *supported):
        reasons.append(
            f"--attention-backend {attention.backend.name}: spans run on FLASH_ATTN and TRITON_ATTN; drop the flag"
        )
    if attention.backend_per_kind:
        reasons.append("attention backends per kind of layer: spans run all layers on one")
    if (
        attention.backend == AttentionBackendEnum.FLASH_ATTN
        and config.model_config.dtype.itemsize != 2
    ):
        reasons.append(
            f"--dtype {config.model_config.dtype}: FlashAttention takes float16 and bfloat16; drop the flag "
            "--attention-backend"
        )
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype in ("fp8", "fp8_e4m3") and not current_platform.has_device_capability(89):
        reasons.append(
            f"--kv-cache-dtype {cache_dtype} on a GPU older than Ada (compute capability 8.9): use fp8_e5m2 or auto"
        )
    if config.parallel_config.enable_dbo:
        reasons.append("dual-batch overlap shares no scratch cache; drop --enable-dbo")
    return reasons
