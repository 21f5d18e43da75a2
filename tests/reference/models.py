"""Tiny random models as Hugging Face folders, one per rotary form the engine must get right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 2048

# A wide init makes a random model sensitive to its context: with the default of 0.02 a wrong KV
# changes the logits by less than the tolerance, and the tests could not fail.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _llama(**extra: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            # Long enough for 256 spans of two blocks.
            **{**_COMMON, "max_position_embeddings": 32768, "head_dim": 32, **extra}
        )
    )


def _llama3_rope() -> Any:
    return _llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        max_position_embeddings=8192,
    )


def _yarn_rope() -> Any:
    return _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 512,
        },
        max_position_embeddings=8192,
    )


def _qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_COMMON, head_dim=32))


def _stablelm() -> Any:
    return transformers.StableLmForCausalLM(
        transformers.StableLmConfig(
            **_COMMON, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        )
    )


def _glm4() -> Any:
    return transformers.Glm4ForCausalLM(
        transformers.Glm4Config(
            **_COMMON,
            head_dim=32,
            rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
    )


def _cohere2() -> Any:
    # Sliding layers rotate and full layers do not; the window is longer than any test prompt.
    return transformers.Cohere2ForCausalLM(
        transformers.Cohere2Config(
            **{**_COMMON, "tie_word_embeddings": True},
            sliding_window=8192,
            layer_types=["sliding_attention", "full_attention"] * 2,
            logit_scale=1.0,
        )
    )


def _smollm3() -> Any:
    return transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(**_COMMON, no_rope_layers=[1, 0, 1, 0])
    )


BUILDERS: dict[str, Any] = {
    "llama": _llama,
    "llama3_rope": _llama3_rope,
    "yarn_rope": _yarn_rope,
    "qwen3": _qwen3,
    "stablelm": _stablelm,
    "glm4": _glm4,
    "cohere2": _cohere2,
    "smollm3": _smollm3,
}
# Rotary pairs are neighbouring channels instead of two halves.
INTERLEAVED = {"glm4", "cohere2"}


def save_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Build a random model in float32 and save it.

    Args:
        name: One of :data:`BUILDERS`.
        folder: Where the Hugging Face folder goes.
        seed: Random seed of the weights.

    Returns:
        ``folder``.
    """
    torch.manual_seed(seed)
    BUILDERS[name]().float().save_pretrained(folder)
    return folder
