"""A stock attention backend in plain torch, for machines where vLLM's own CUDA backends do not run."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


class PagedReferenceBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Hands the common metadata through."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class PagedReferenceImpl(AttentionImpl[CommonAttentionMetadata]):
    """Causal attention over rotated pages ``[pages, kv_heads, page tokens, 2 * head_size]``, in float64."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        *args: Any,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert kv_cache_dtype == "auto", "scratch pages are not quantised"
        self.scale, self.group, self.head_size = scale, num_heads // num_kv_heads, head_size
        self.window, self.softcap, self.sinks = sliding_window, logits_soft_cap, sinks

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        assert float(layer._k_scale) == float(layer._v_scale) == 1.0
        starts = attn_metadata.query_start_loc.tolist()
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            pages = kv_cache[attn_metadata.block_table_tensor[row].long()]
            flat = pages.transpose(1, 2).flatten(0, 1)[:length].double()
            k, v = flat.split(self.head_size, dim=-1)
            first = length - (tokens.stop - tokens.start)
            for index in range(tokens.start, tokens.stop):
                position = first + index - tokens.start
                output[index] = attend(
                    query[index],
                    k[: position + 1],
                    v[: position + 1],
                    self.group,
                    self.scale,
                    -1 if self.window is None else self.window - 1,
                    self.softcap or 0.0,
                    self.sinks,
                )
        return output


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: int,
    scale: float,
    window_left: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query ``[heads, head_size]`` at the last position of rotated ``[tokens, kv_heads, head_size]``."""
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("hd,nhd->hn", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if window_left >= 0:
        scores[:, : max(0, key.shape[0] - 1 - window_left)] = float("-inf")
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    weights = scores.softmax(-1)[:, : key.shape[0]]
    return torch.einsum("hn,nhd->hd", weights, value)
