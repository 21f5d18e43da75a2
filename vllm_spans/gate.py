"""The gate: what an engine with spans handles. Everything else is refused at start-up, by name, with the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_spans.config import ENABLED_ENV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED_VLLM = ("0.32.0",)

SUPPORTED_ARCHITECTURES = frozenset(
    {
        "GemmaForCausalLM",
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
"""Architectures whose attention rotates Q and K with one rotary module of vLLM right before the attention, in every
layer. Models that vLLM runs on the code of ``transformers`` are not among them: that code rotates by itself."""

NOPE_ARCHITECTURES = frozenset({"GraniteForCausalLM"})
"""Of these, the ones that have no rotary module where they do not rotate (Granite with ``rope_theta`` 0)."""


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
    text_config = model.hf_text_config
    rope = (
        getattr(text_config, "rope_parameters", None)
        or getattr(text_config, "rope_scaling", None)
        or {}
    )
    rope_type = (
        rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    )
    if rope_type not in ("default", "linear", "llama3", "yarn", "proportional"):
        reasons.append(
            f"RoPE of type {rope_type!r}: its rotation depends on more than the position"
        )
    if _has_windows(config):
        reasons.append(
            "sliding-window or chunked attention layers: not handled on this platform yet; use a full-attention model"
        )
    return reasons


def _has_windows(config: VllmConfig) -> bool:
    text_config = config.model_config.hf_text_config
    layer_types = getattr(text_config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in layer_types):
        return True
    return config.cache_config.sliding_window is not None


def _cache_reasons(config: VllmConfig) -> list[str]:
    cache = config.cache_config
    reasons = []
    if not cache.enable_prefix_caching:
        reasons.append("prefix caching is off: drop --no-enable-prefix-caching")
    if cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        reasons.append(
            f"--kv-cache-dtype {cache.cache_dtype}: not handled on this platform yet; use auto"
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
            "SpansOffloadingConnector runs on the CPU build only so far; drop --kv-transfer-config"
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
    backend = config.attention_config.backend
    if backend not in (None, AttentionBackendEnum.FLASH_ATTN):
        reasons.append(
            f"--attention-backend {backend.name}: spans run on FLASH_ATTN; drop the flag"
        )
    if config.model_config.dtype.itemsize != 2:
        reasons.append(
            f"--dtype {config.model_config.dtype}: FlashAttention takes float16 and bfloat16"
        )
    if config.parallel_config.enable_dbo:
        reasons.append("dual-batch overlap shares no scratch cache; drop --enable-dbo")
    return reasons
