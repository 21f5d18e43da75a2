"""What the engines of a benchmark run: sizes, CUDA graphs, compilation, variants. All of it alike for both engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

PIECEWISE, DECODE, NONE = "piecewise", "decode", "none"
GRAPHS = (PIECEWISE, DECODE, NONE)
COMPILE = 3
"""vLLM's compilation mode with torch.compile and Inductor; 0 runs the model as written."""

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_LLAMA = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Arguments of ``vllm.LLM`` and the environment that goes with them."""

    arguments: dict[str, Any]
    environ: dict[str, str] = dataclasses.field(default_factory=dict)

    def plus(self, **arguments: Any) -> EngineOptions:
        """The same with further arguments."""
        return dataclasses.replace(self, arguments=self.arguments | arguments)

    def within(self, **environ: str) -> EngineOptions:
        """The same with further environment variables."""
        return dataclasses.replace(self, environ=self.environ | environ)

    def described(self) -> dict[str, Any]:
        """For the result file: all but the model's folder, which means nothing elsewhere."""
        arguments = {name: value for name, value in self.arguments.items() if name != "model"}
        return {"arguments": arguments, "environment": self.environ}


def capture_sizes(most: int) -> list[int]:
    """Batch sizes to capture: powers of two to 256, then every 64 tokens."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, *range(256, most + 1, 64)]
    return [size for size in sizes if size <= most]


def execution(graphs: str, compiled: bool, capture_max: int) -> EngineOptions:
    """How the model is run on a GPU.

    Args:
        graphs: One of :data:`GRAPHS`. ``piecewise`` captures prefill without its attention and decode whole,
            ``decode`` decode alone, ``none`` nothing.
        compiled: Use torch.compile. Piecewise graphs are then those of the compiled pieces; without it vLLM
            breaks a graph at each attention.
        capture_max: Most tokens of a captured step.
    """
    mode = {PIECEWISE: "FULL_AND_PIECEWISE", DECODE: "FULL_DECODE_ONLY", NONE: "NONE"}[graphs]
    config: dict[str, Any] = {"mode": COMPILE if compiled else 0, "cudagraph_mode": mode}
    if graphs != NONE:
        most = capture_max if graphs == PIECEWISE else min(capture_max, 256)
        config["cudagraph_capture_sizes"] = capture_sizes(most)
    breakable = graphs == PIECEWISE and not compiled
    environ = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if breakable else {}
    return EngineOptions({"compilation_config": config}, environ)


def on_cpu(threads: int | None = None) -> EngineOptions:
    """How a small model is run on a CPU.

    Args:
        threads: Of OpenMP; ``None`` leaves vLLM's choice.
    """
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if threads is not None:
        # A tiny model gains nothing from more, and threads that spin starve the other engine.
        environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return EngineOptions({"dtype": "float32", "enforce_eager": True, "block_size": 32}, environ)


def write_config(config: dict[str, Any], folder: Path) -> Path:
    """A model folder for ``load_format="dummy"``: a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kind of engine whose answers are compared.

    Attributes:
        execution: How the model is run on a GPU.
        arguments: Further arguments of both engines, on any platform.
        baseline: Arguments of a second stock engine; what the two stock engines differ by is noise as well.
        models: Names in :data:`benchmarks.tiny_models.MODELS`, compared one after the other.
        real_model: Whether the model that ``--model`` names can run like that.
        gpu_only: Whether it needs a GPU.
        little_room: Whether engines with a small cache or small budgets are compared too.
        tiers: Whether an engine with CPU memory and files behind its cache is compared too.
    """

    execution: EngineOptions
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    baseline: dict[str, Any] | None = None
    models: tuple[str, ...] = ("llama",)
    real_model: bool = True
    gpu_only: bool = False
    little_room: bool = False
    tiers: bool = False


_DEFAULT = execution(DECODE, False, 256)
VARIANTS = {
    "default": Variant(_DEFAULT, little_room=True),
    "fp8": Variant(
        _DEFAULT,
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "auto"},
        gpu_only=True,
        little_room=True,
    ),
    "tiers": Variant(_DEFAULT, tiers=True),
    "compiled": Variant(execution(PIECEWISE, True, 512), gpu_only=True),
    "graphs": Variant(execution(PIECEWISE, False, 512), gpu_only=True),
    "fa2": Variant(_DEFAULT, {"attention_config": {"flash_attn_version": 2}}, gpu_only=True),
    "triton": Variant(_DEFAULT, {"attention_config": {"backend": "TRITON_ATTN"}}, gpu_only=True),
    "v1": Variant(_DEFAULT.within(VLLM_USE_V2_MODEL_RUNNER="0"), gpu_only=True),
    # SmolLM2 has three KV heads, which two ranks cannot share.
    "tp2": Variant(
        _DEFAULT,
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        real_model=False,
    ),
    "windows": Variant(
        _DEFAULT,
        {"disable_hybrid_kv_cache_manager": True},
        models=("mistral_windows", "gemma3_windows"),
        real_model=False,
    ),
}
