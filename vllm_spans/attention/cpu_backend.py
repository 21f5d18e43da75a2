"""CPU attention over un-rotated K: gather, rotate, then vLLM's own C++ kernel.

The cache holds K and V as plain pages. Each layer keeps the pages that rows read, rotated, in a second cache in the
stock kernel's packed layout, which stays vLLM's business (``cpu_attn_reshape_and_cache``), and runs the stock kernel
on it. The second cache grows with use, up to the size of the first. A step that reads more pages than that (the same
blocks at many places) rotates them all, pass by pass, into a scratch cache that all layers share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_spans.attention import outside_writes
from vllm_spans.attention.rotated_pages import RotatedPages
from vllm_spans.attention.scratch import ScratchPass, pass_of_kept_pages, plan_scratch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_spans.attention.rotary import LayerRotary

SCRATCH_TOKENS = 256 * 1024
"""Most tokens that one pass rotates into the shared scratch; more rows than that run in several passes."""


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
    """Stock metadata and, per pass, the pages to rotate and the stock metadata over the rotated cache.

    Attributes:
        passes: In order of rows.
        kept: Whether the one pass writes to the layers' kept pages.
        layers_done: Layers that have run the step.
    """

    passes: list[tuple[ScratchPass, CPUAttentionMetadata]] | None = None
    kept: bool = False
    layers_done: int = 0


class SpansCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans the pages to rotate once per step; all layers use the plan."""

    _kept_pages: RotatedPages | None = None
    _previous: SpansCPUMetadata | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpansCPUMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        max_position = self.vllm_config.model_config.max_model_len - 1
        if written := outside_writes.take():
            self._pages().drop_blocks(torch.tensor(written))
        kept = self._pages().step(stock.block_table, stock.seq_lens, stock.slot_mapping)
        if kept is not None:
            passes = [pass_of_kept_pages(kept, self.block_size, max_position)]
        else:
            passes = plan_scratch(
                stock.block_table,
                stock.seq_lens,
                self.block_size,
                max(1, SCRATCH_TOKENS // self.block_size),
                max_position,
            )
        self._previous = SpansCPUMetadata(
            **vars(stock),
            passes=[(scratch, self._metadata_of(stock, scratch)) for scratch in passes],
            kept=kept is not None,
        )
        return self._previous

    def _pages(self) -> RotatedPages:
        if self._kept_pages is None:
            context = self.vllm_config.compilation_config.static_forward_context
            num_blocks = context[self.layer_names[0]].kv_cache.shape[0]
            places = -(-self.vllm_config.model_config.max_model_len // self.block_size) + 1
            self._kept_pages = RotatedPages(num_blocks, self.block_size, places)
        elif self._previous is not None and self._previous.layers_done != len(self.layer_names):
            # The last plan was not carried out by every layer: what it says is kept may not be.
            self._kept_pages.clear()
        return self._kept_pages

    def _metadata_of(
        self, stock: CPUAttentionMetadata, scratch: ScratchPass
    ) -> CPUAttentionMetadata:
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
    _kept: torch.Tensor | None = None
    _scratch: ClassVar[torch.Tensor | None] = None

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
            rotated = self._rotated_cache(kv_cache, scratch.num_pages, attn_metadata.kept)
            self._gather_rotate(layer, kv_cache, scratch, rotated)
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
        attn_metadata.layers_done += 1
        return output

    def _gather_rotate(
        self, layer: Any, kv_cache: torch.Tensor, scratch: ScratchPass, rotated: torch.Tensor
    ) -> None:
        """Write the rotated pages of a pass.

        Args:
            layer: Names the stock kernel's layout (``isa``).
            kv_cache: Un-rotated pages of the layer.
            scratch: What to rotate, and to which pages.
            rotated: ``[pages, kv_heads, block_size, 2 * head_size]``, in the stock kernel's layout.
        """
        _, num_heads, block_size, _ = kv_cache.shape
        num_tokens = scratch.source_blocks.shape[0] * block_size
        if not num_tokens:
            return
        pages = _plain_pages(kv_cache)
        key = pages[:, 0].index_select(0, scratch.source_blocks).view(num_tokens, -1)
        value = pages[:, 1].index_select(0, scratch.source_blocks).view(num_tokens, num_heads, -1)
        if self.layer_rotary is not None:
            self.layer_rotary.rotate(key, scratch.positions)
        key_cache, value_cache = rotated.view(
            rotated.shape[0], num_heads, block_size * 2, -1
        ).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key.view(num_tokens, num_heads, -1),
            value,
            key_cache,
            value_cache,
            scratch.slots,
            layer.isa,
        )

    def _rotated_cache(self, kv_cache: torch.Tensor, num_pages: int, kept: bool) -> torch.Tensor:
        """A rotated cache of at least ``num_pages`` pages: the layer's own, or one for all layers in turn."""
        old = self._kept if kept else SpansCPUAttentionImpl._scratch
        shape = kv_cache.shape[1:]
        if old is not None and (old.shape[1:] != shape or old.dtype != kv_cache.dtype):
            old = None
        if old is not None and old.shape[0] >= num_pages:
            return old
        grown = torch.zeros((num_pages, *shape), dtype=kv_cache.dtype)
        if kept:
            if old is not None:
                grown[: old.shape[0]] = old
            self._kept = grown
        else:
            SpansCPUAttentionImpl._scratch = grown
        return grown


def _plain_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """The layer's storage as ``[blocks, 2, block_size, kv_heads * head_size]``: K and V of a block, token by token."""
    num_blocks, num_heads, block_size, double_head = kv_cache.shape
    return kv_cache.view(num_blocks, 2, block_size, num_heads * double_head // 2)
