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


WINDOW = 41
"""Shorter than a prompt, longer than a block, and no multiple of one: an error of one position shows."""

_ALTERNATING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
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
    # Layers with a window rotate, the others do not.
    return transformers.Cohere2ForCausalLM(
        transformers.Cohere2Config(
            **{**_COMMON, "tie_word_embeddings": True},
            **_ALTERNATING,
            logit_scale=1.0,
        )
    )


def _mistral_window() -> Any:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**_COMMON, head_dim=32, sliding_window=WINDOW)
    )


def _qwen2_window() -> Any:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **_COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0
        )
    )


def _gemma2() -> Any:
    # A cap as low as the scores of random weights, so that it bends them.
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **{**_COMMON, "tie_word_embeddings": True},
            **_ALTERNATING,
            head_dim=32,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=2.0,
        )
    )


def _gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **{**_COMMON, "tie_word_embeddings": True},
            **_ALTERNATING,
            head_dim=32,
            query_pre_attn_scalar=32,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        )
    )


def _gpt_oss() -> Any:
    model = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **_COMMON,
            **_ALTERNATING,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        )
    )
    for layer in model.model.layers:
        # As large as the scores: a sink near 0 is lost beside them.
        torch.nn.init.normal_(layer.self_attn.sinks, std=3.0)
    return model


def _smollm3() -> Any:
    return transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(**_COMMON, no_rope_layers=[1, 0, 1, 0])
    )


def _phi() -> Any:
    return transformers.PhiForCausalLM(
        transformers.PhiConfig(
            **_COMMON, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        )
    )


def _gpt_neox() -> Any:
    common = {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **common, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        )
    )


def _phi3() -> Any:
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **_COMMON,
            sliding_window=WINDOW,
            original_max_position_embeddings=8192,
            rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        )
    )


def _gemma() -> Any:
    return transformers.GemmaForCausalLM(
        transformers.GemmaConfig(**{**_COMMON, "tie_word_embeddings": True}, head_dim=32)
    )


def _granite() -> Any:
    return transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**_COMMON, attention_multiplier=0.2, residual_multiplier=0.7)
    )


def _granite_nope() -> Any:
    # Half of the layers do not rotate; transformers does not know the field, the oracle does.
    return transformers.GraniteForCausalLM(
        transformers.GraniteConfig(
            **_COMMON, attention_multiplier=0.2, layer_rope_theta=[10000.0, 0, 10000.0, 0]
        )
    )


def _olmo2() -> Any:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**_COMMON))


def _starcoder2() -> Any:
    return transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(**_COMMON, sliding_window=None)
    )


def _mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **_COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        )
    )


def _qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_COMMON))


BUILDERS: dict[str, Any] = {
    "llama": _llama,
    "llama3_rope": _llama3_rope,
    "yarn_rope": _yarn_rope,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "stablelm": _stablelm,
    "phi": _phi,
    "phi3": _phi3,
    "gpt_neox": _gpt_neox,
    "gemma": _gemma,
    "granite": _granite,
    "granite_nope": _granite_nope,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
    "mixtral": _mixtral,
    "glm4": _glm4,
    "cohere2": _cohere2,
    "smollm3": _smollm3,
    "mistral_window": _mistral_window,
    "qwen2_window": _qwen2_window,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
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
