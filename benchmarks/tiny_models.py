"""Small random models whose answers depend on their context and are not a tie between tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 4000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    # With the default of 0.02 the context would hardly change the logits, and no comparison could fail; with 0.1
    # four layers make ten times more of the noise.
    "initializer_range": 0.04,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "initializer_range": 0.08,  # as large, seen through half as long rows
}
WINDOW = 256
TOP_LOGIT = 20.0


def _llama(shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**shape))


def _mistral(shape: dict[str, Any]) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**shape, sliding_window=WINDOW))


def _gemma3(shape: dict[str, Any]) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"] * (shape["num_hidden_layers"] // 2)
    config = Gemma3TextConfig(
        **shape,
        sliding_window=WINDOW,
        layer_types=layers,
        query_pre_attn_scalar=shape["head_dim"],
    )
    return Gemma3ForCausalLM(config)


MODELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": _llama,
    "mistral_windows": _mistral,
    "gemma3_windows": _gemma3,
}


def save_model(name: str, folder: Path, dtype: str, small: bool = False) -> Path:
    """Make a model and save it.

    Args:
        name: One of :data:`MODELS`.
        folder: Where its folder goes.
        dtype: ``"bfloat16"`` or ``"float32"``.
        small: Two layers, for a CPU.
    """
    import torch

    torch.manual_seed(0)
    model = MODELS[name](SHAPE | (SMALL if small else {}))
    _sharpen(model)
    path = folder / name
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def _sharpen(model: Any) -> None:
    """Give the rows of the head very different lengths, and its largest logit a size as in trained models.

    The two best of thousands of equally long random rows are nearly always within a few times bfloat16's noise of each
    other. Of rows whose length is log-normal a few dozen compete, and the gap between them is several times as wide.
    """
    import torch

    with torch.no_grad():
        head = model.lm_head.weight
        head.mul_(torch.randn(len(head), 1).exp())
        hidden = torch.randn(256, head.shape[1])
        largest = (hidden @ head.T).max(dim=1).values.mean()
        head.mul_(TOP_LOGIT / largest)
