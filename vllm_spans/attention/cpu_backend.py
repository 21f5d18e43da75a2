"""CPU attention over un-rotated K: gather, rotate, then vLLM's own C++ kernel.

The cache holds K and V as plain pages. Each layer rotates the pages that the step's rows need into a scratch cache
in the stock kernel's packed layout, which stays vLLM's business (``cpu_attn_reshape_and_cache``), and runs the stock
kernel on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_spans.attention.scratch import ScratchPass, plan_scratch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_spans.attention.rotary import LayerRotary

SCRATCH_TOKENS = int(os.environ.get("VLLM_SPANS_CPU_SCRATCH_TOKENS", 256 * 1024))
"""Most tokens that one pass rotates; more rows than that run in several passes. All layers share the scratch."""


class SpansCPUAttentionBackend(CPUAttentionBackend):
    """Registered in place of ``CPU_ATTN``, the one name that vLLM's CPU platform picks."""

    @staticmethod
    def get_impl_cls() -> type[SpansCPUAttentionImpl]:
        return SpansCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SpansCPUMetadataBuilder]:
        return SpansCPUMetadataBuilder


@dataclass
class SpansCPUMetadata(CPUAttentionMetadata):
    """Stock metadata and, per pass, the pages to rotate and the stock metadata over the scratch cache."""

    passes: list[tuple[ScratchPass, CPUAttentionMetadata]] | None = None
    slot_blocks: torch.Tensor | None = None
    slot_offsets: torch.Tensor | None = None


class SpansCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans the scratch pages once per step; all layers use the plan."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpansCPUMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        passes = [
            (scratch, self._metadata_of(stock, scratch))
            for scratch in plan_scratch(
                stock.block_table,
                stock.seq_lens,
                self.block_size,
                max(1, SCRATCH_TOKENS // self.block_size),
                self.vllm_config.model_config.max_model_len - 1,
            )
        ]
        return SpansCPUMetadata(**vars(stock), passes=passes)

    def _metadata_of(self, stock: CPUAttentionMetadata, scratch: ScratchPass) -> CPUAttentionMetadata:
        rows = slice(scratch.first_row, scratch.last_row)
        starts = stock.query_start_loc[scratch.first_row : scratch.last_row + 1]
        starts = starts - starts[0]
        seq_lens = stock.seq_lens[rows]
        scheduler_metadata = stock.scheduler_metadata
        if scratch.last_row - scratch.first_row != stock.seq_lens.shape[0]:
            scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=seq_lens.shape[0],
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                seq_lens=seq_lens,
                dtype=self.dtype,
                query_start_loc=starts,
                causal=stock.causal,
                sliding_window_size=self.window_size,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=self.kv_cache_dtype,
            )
        return replace(
            stock,
            num_actual_tokens=int(starts[-1]),
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=scratch.block_table,
            scheduler_metadata=scheduler_metadata,
        )


class SpansCPUAttentionImpl(CPUAttentionBackendImpl):
    """Stock implementation over a scratch cache of rotated K.

    Attributes:
        layer_rotary: Set by ``install_query_rotary``; ``None`` for a layer without RoPE.
    """

    layer_rotary: LayerRotary | None
    _scratch: torch.Tensor | None = None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K as the model gives it, not rotated, and V.

        Args:
            layer: Not used.
            key: ``[tokens, kv_heads, head_size]``.
            value: Same shape.
            kv_cache: Pages of the layer, ``[blocks, kv_heads, block_size, 2 * head_size]``; read here as plain
                pages ``[blocks, 2, block_size, kv_heads * head_size]``.
            slot_mapping: ``[tokens]``; negative for a token that is not stored.
        """
        pages = _plain_pages(kv_cache)
        tokens = slot_mapping.shape[0]
        key = key[:tokens].reshape(tokens, -1)
        value = value[:tokens].reshape(tokens, -1)
        if tokens and int(slot_mapping.min()) < 0:
            stored = slot_mapping >= 0
            slot_mapping, key, value = slot_mapping[stored], key[stored], value[stored]
        block_size = pages.shape[2]
        blocks = slot_mapping // block_size
        offsets = slot_mapping - blocks * block_size
        pages[blocks, 0, offsets] = key
        pages[blocks, 1, offsets] = value

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpansCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Same arguments and shapes as the stock ``forward``; ``query`` is rotated, cached K is not."""
        if attn_metadata is None:
            return output
        assert attn_metadata.passes is not None
        first = 0
        for scratch, metadata in attn_metadata.passes:
            last = first + metadata.num_actual_tokens
            rotated = self._gather_rotate(layer, kv_cache, scratch)
            super().forward(
                layer,
                query[first:last],
                key[first:last],
                value[first:last],
                rotated,
                metadata,
                output[first:last],
                output_scale,
                output_block_scale,
            )
            first = last
        return output

    def _gather_rotate(
        self, layer: Any, kv_cache: torch.Tensor, scratch: ScratchPass
    ) -> torch.Tensor:
        """Rotated pages of a pass in the stock kernel's layout, ``[pages, kv_heads, block_size, 2 * head_size]``."""
        _, num_heads, block_size, _ = kv_cache.shape
        pages = _plain_pages(kv_cache)
        num_tokens = scratch.source_blocks.shape[0] * block_size
        key = pages[:, 0].index_select(0, scratch.source_blocks).view(num_tokens, -1)
        value = pages[:, 1].index_select(0, scratch.source_blocks).view(num_tokens, num_heads, -1)
        if self.layer_rotary is not None:
            self.layer_rotary.rotate(key, scratch.positions)
        rotated = self._scratch_pages(kv_cache, scratch.source_blocks.shape[0])
        key_cache, value_cache = rotated.view(
            rotated.shape[0], num_heads, block_size * 2, -1
        ).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key.view(num_tokens, num_heads, -1),
            value,
            key_cache,
            value_cache,
            torch.arange(num_tokens, dtype=torch.int64),
            layer.isa,
        )
        return rotated

    @classmethod
    def _scratch_pages(cls, kv_cache: torch.Tensor, num_pages: int) -> torch.Tensor:
        """Scratch cache of at least ``num_pages`` pages, one for all layers: they run one after the other."""
        scratch = cls._scratch
        shape = kv_cache.shape[1:]
        if (
            scratch is None
            or scratch.shape[0] < num_pages
            or scratch.shape[1:] != shape
            or scratch.dtype != kv_cache.dtype
        ):
            grown = num_pages if scratch is None else max(num_pages, scratch.shape[0])
            cls._scratch = scratch = torch.zeros((grown, *shape), dtype=kv_cache.dtype)
        return scratch


def _plain_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """The layer's storage as ``[blocks, 2, block_size, kv_heads * head_size]``: K and V of a block, token by token."""
    num_blocks, num_heads, block_size, double_head = kv_cache.shape
    return kv_cache.view(num_blocks, 2, block_size, num_heads * double_head // 2)
