"""Splits RoPE in two: the model rotates Q, the attention rotates K when it reads it.

The pair of a decoder attention and its rotary embedding is found by walking the modules, and only the instance in
that pair is replaced: vLLM shares one rotary embedding between layers and with drafters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from vllm_spans.gate import RopeLayers

SUPPORTED_ROTARY = (
    RotaryEmbedding,
    Llama3RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
"""Rotary classes whose rotation of one token is a function of its position alone, read from ``cos_sin_cache``."""


class RotaryError(ValueError):
    """The model's use of RoPE is not one that spans handle."""


@dataclass(frozen=True)
class LayerRotary:
    """How one layer rotates K.

    Attributes:
        cos_sin_cache: ``[max_position, rotary_dim]``; scaling and magnitude are in it.
        head_size: Elements per head; those past ``rotary_dim`` are not rotated.
        is_neox: Halves (neox) or interleaved pairs (gptj).
    """

    cos_sin_cache: torch.Tensor
    head_size: int
    is_neox: bool

    def rotate(self, key: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate K in place, with the operation that vLLM rotates it with.

        Args:
            key: ``[tokens, heads * head_size]``, contiguous.
            positions: ``[tokens]``, int64.
        """
        cache = self.cos_sin_cache
        if cache.dtype != key.dtype:
            cache = cache.to(key.dtype)
        ops.rotary_embedding(positions, key, None, self.head_size, cache, self.is_neox)


class QueryRotary(nn.Module):
    """Stands in for a rotary embedding: rotates Q and hands K through."""

    def __init__(self, rotary: RotaryEmbeddingBase) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same arguments and shapes as the embedding it stands in for."""
        query, _ = self.rotary(positions, query, None)
        return query, key


class UnusedRotary(nn.Module):
    """Stands in for the rotary embedding of a layer that is known not to rotate."""

    def __init__(self, owner_name: str) -> None:
        super().__init__()
        self.owner_name = owner_name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            RotaryError: Always: the layer does rotate.
        """
        raise RotaryError(f"{self.owner_name} rotates, though it has no sliding window")


def install_query_rotary(
    model: nn.Module, rope_layers: RopeLayers = RopeLayers.ALL
) -> dict[str, LayerRotary | None]:
    """Replace the rotary embedding of every decoder attention.

    Args:
        model: A loaded model, not yet compiled.
        rope_layers: Which layers rotate. A layer that should and has no rotary embedding rotates in a way that is
            not seen here.

    Returns:
        Per attention layer how to rotate its K; ``None`` for a layer without RoPE.

    Raises:
        RotaryError: An attention's rotary embedding is of a kind that is not handled, or cannot be told.
    """
    layers: dict[str, LayerRotary | None] = {}
    for owner_name, owner in list(model.named_modules()):
        attentions = [child for child in owner.children() if isinstance(child, Attention)]
        if not attentions:
            continue
        # Not ``named_children``: that names an instance once, and a module may hold it under two names.
        found = {
            name: child
            for name, child in owner._modules.items()
            if isinstance(child, RotaryEmbeddingBase)
        }
        if len({id(embedding) for embedding in found.values()}) > 1:
            raise RotaryError(f"{owner_name} has several rotary embeddings: {', '.join(found)}")
        rotary = None
        for name, embedding in found.items():
            if type(embedding) not in SUPPORTED_ROTARY:
                raise RotaryError(
                    f"{owner_name}.{name} is a {type(embedding).__name__}; spans handle "
                    f"{', '.join(cls.__name__ for cls in SUPPORTED_ROTARY)}"
                )
            rotary = LayerRotary(
                embedding.cos_sin_cache, embedding.head_size, embedding.is_neox_style
            )
            setattr(owner, name, QueryRotary(embedding))
        if rope_layers is RopeLayers.WITH_WINDOW and not _has_window(attentions):
            rotary = None
            for name in found:
                setattr(owner, name, UnusedRotary(owner_name))
        elif rotary is None and rope_layers is not RopeLayers.WITH_MODULE:
            raise RotaryError(
                f"{owner_name} has an attention but no rotary embedding: how its K is rotated cannot be told"
            )
        for attention in attentions:
            layers[attention.layer_name] = rotary
            attention.impl.layer_rotary = rotary  # type: ignore[attr-defined]
    if not layers:
        raise RotaryError("no attention layer was found in the model")
    return layers


def _has_window(attentions: list[Attention]) -> bool:
    return any(attention.sliding_window is not None for attention in attentions)
