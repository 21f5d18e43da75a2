"""Compiles the decode kernel before the first request: Triton compiles on the first call, for seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_spans.attention.kernels.decode import row_classes

if TYPE_CHECKING:
    from vllm_spans.attention.kernels.decode import DecodeWorkspace


def warm_up_decode(layers: list[Any], workspace: DecodeWorkspace, block_columns: int) -> int:
    """Run decode once per kind of layer and class of batch sizes, on rows without tokens.

    CUDA graphs compile only what they capture; a step of decode and prefill rows runs without them.

    Args:
        layers: Attention layers with a ``SpansCudaAttentionImpl``, bound to their KV cache.
        workspace: Of the metadata builder.
        block_columns: Columns of vLLM's block table.

    Returns:
        Number of kernels that were compiled.
    """
    kinds: dict[Any, Any] = {}
    for layer in layers:
        kinds.setdefault(layer.impl.decode_kind, layer)
    device = workspace.accumulators.device
    for layer in kinds.values():
        for most in row_classes(workspace.max_rows):
            rows = min(most, workspace.max_rows)
            query = torch.zeros(
                (rows, layer.num_heads, layer.head_size), dtype=layer.dtype, device=device
            )
            layer.impl.decode(
                layer,
                query,
                layer.kv_cache,
                torch.zeros((rows, block_columns), dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
                torch.empty_like(query),
                workspace,
            )
    return len(kinds) * len(row_classes(workspace.max_rows))
