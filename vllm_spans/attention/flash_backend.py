"""CUDA attention over un-rotated K: stock FlashAttention for prefill rows, a fused kernel for decode rows.

Prefill, gap and isolated rows: one kernel rotates the pages that the step's rows read into a scratch cache that all
layers share; vLLM's FlashAttention (FA3 on Hopper, FA2 elsewhere) runs on that. Decode rows read K once, so its
rotation is fused into a split-KV decode kernel, which CUDA graphs capture.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_spans.attention.gather_plan import GatherPass, plan_gather
from vllm_spans.attention.kernels.decode import DecodeWorkspace, decode_attention
from vllm_spans.attention.kernels.gather_rotate import gather_rotate
from vllm_spans.core.rows import group_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from vllm_spans.attention.rotary import LayerRotary

SCRATCH_PAGE_TOKENS = 128
"""Tokens per scratch page. A group's pages are consecutive, so the stock kernel may read larger pages than blocks."""


class StepRows(threading.local):
    """Ids of the rows of the step whose attention metadata is being built, in batch order.

    The runner knows them, the metadata builder is not told.
    """

    ids: list[str] | None = None


step_rows = StepRows()


class SpansFlashAttentionBackend(FlashAttentionBackend):
    """Registered in place of ``FLASH_ATTN``."""

    @staticmethod
    def get_impl_cls() -> type[SpansFlashAttentionImpl]:
        return SpansFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SpansFlashMetadataBuilder]:
        return SpansFlashMetadataBuilder


@dataclass
class PrefillPass:
    """Prefill rows whose scratch pages exist at the same time.

    Attributes:
        tokens: Their tokens in the batch.
        block_table: ``[rows, columns]`` blocks of the rows, for those that lead a group.
        groups: ``[groups]`` int32 each: leading row, blocks, first scratch block.
        max_blocks: Most blocks of a group.
        stock: Stock metadata over the scratch cache.
    """

    tokens: slice
    block_table: torch.Tensor
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    max_blocks: int
    stock: FlashAttentionMetadata


@dataclass
class SpansFlashMetadata:
    """Metadata of a step: decode rows first, then prefill rows.

    Attributes:
        num_decodes: Leading rows of one token each.
        seq_lens: ``[rows]``.
        block_table: ``[rows, columns]``.
        slot_mapping: ``[tokens]``.
        passes: Of the prefill rows.
    """

    num_actual_tokens: int
    num_decodes: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    passes: list[PrefillPass]
    workspace: DecodeWorkspace


class SpansFlashMetadataBuilder(AttentionMetadataBuilder[SpansFlashMetadata]):
    """Splits a step into decode and prefill rows and places the latter in the scratch cache."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size = kv_cache_spec.block_size
        self._blocks_per_page = max(1, SCRATCH_PAGE_TOKENS // self._block_size)
        page = replace(kv_cache_spec, block_size=self._block_size * self._blocks_per_page)
        self._stock = FlashAttentionMetadataBuilder(page, layer_names, vllm_config, device)
        # Prefill never runs inside a graph, so its schedule needs no buffer at a fixed address.
        self._stock.use_full_cuda_graph = False
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        self._capacity = scratch_pages(vllm_config, self._block_size * self._blocks_per_page)
        self._workspace = DecodeWorkspace.create(
            max_rows=max(
                scheduler.max_num_seqs,
                vllm_config.compilation_config.max_cudagraph_capture_size or 0,
            ),
            kv_heads=kv_cache_spec.num_kv_heads,
            group=self._stock.num_heads_q // kv_cache_spec.num_kv_heads,
            head_size=kv_cache_spec.head_size,
            max_seq_len=model.max_model_len,
            device=device,
            kv_dtype=kv_cache_spec.dtype,
        )
        self._columns = torch.arange(self._capacity + 1, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpansFlashMetadata:
        common = common_attn_metadata
        num_decodes = common.num_reqs
        if common.max_query_len > 1:
            starts = common.query_start_loc_cpu.numpy()
            num_decodes = int(np.argmax(np.diff(starts[: common.num_reqs + 1]) > 1))
        return SpansFlashMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            passes=self._passes(common, num_decodes) if num_decodes < common.num_reqs else [],
            workspace=self._workspace,
        )

    def _passes(self, common: CommonAttentionMetadata, num_decodes: int) -> list[PrefillPass]:
        ids = step_rows.ids
        num_rows = common.num_reqs - num_decodes
        if ids is not None:
            groups = [group_of(row) for row in ids[num_decodes : common.num_reqs]]
        else:
            # A dummy step: its rows belong to nobody.
            groups = [str(row) for row in range(num_rows)]
        lens = common.seq_lens_cpu_upper_bound
        assert lens is not None, "prefill rows have exact lengths on the host"
        seq_lens = lens[num_decodes : common.num_reqs].numpy()
        plans = plan_gather(
            groups, seq_lens, self._block_size, self._blocks_per_page, self._capacity
        )
        return [self._pass(common, num_decodes, plan, seq_lens) for plan in plans]

    def _pass(
        self,
        common: CommonAttentionMetadata,
        num_decodes: int,
        plan: GatherPass,
        seq_lens: np.ndarray,
    ) -> PrefillPass:
        first, last = num_decodes + plan.first_row, num_decodes + plan.last_row
        num_groups, num_rows = len(plan.group_rows), last - first
        host = np.concatenate(
            (plan.group_rows + num_decodes, plan.group_blocks, plan.group_offsets, plan.row_pages)
        )
        device = torch.from_numpy(host).pin_memory().to(self.device, non_blocking=True)
        rows, blocks, offsets, row_pages = device.split([num_groups] * 3 + [num_rows])
        max_len = int(seq_lens[plan.first_row : plan.last_row].max())
        page_tokens = self._block_size * self._blocks_per_page
        width = -(-max_len // page_tokens)
        starts_cpu = common.query_start_loc_cpu[first : last + 1]
        tokens = slice(int(starts_cpu[0]), int(starts_cpu[-1]))
        starts = common.query_start_loc[first : last + 1]
        stock = self._stock.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts - tokens.start if tokens.start else starts,
                query_start_loc_cpu=starts_cpu - tokens.start,
                seq_lens=common.seq_lens[first:last],
                num_reqs=num_rows,
                num_actual_tokens=tokens.stop - tokens.start,
                max_query_len=int((starts_cpu[1:] - starts_cpu[:-1]).max()),
                max_seq_len=max_len,
                # A row's pages past its end lie outside the group; they are masked, but must exist.
                block_table_tensor=(row_pages[:, None] + self._columns[None, :width]).clamp_(
                    max=self._capacity - 1
                ),
                slot_mapping=common.slot_mapping[tokens],
                causal=common.causal,
            ),
        )
        return PrefillPass(
            tokens=tokens,
            block_table=common.block_table_tensor,
            groups=(rows, blocks, offsets),
            max_blocks=int(plan.group_blocks.max()),
            stock=stock,
        )


@dataclass(frozen=True)
class Scratch:
    """The scratch cache, one for all layers: they run in turn.

    Attributes:
        pages: ``[pages, kv_heads, page tokens, 2 * head_size]``, as the stock kernel reads it.
        key: ``[blocks, block_size, kv_heads, head_size]``, as the gather writes it.
        value: Same shape.
    """

    pages: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class SpansFlashAttentionImpl(FlashAttentionImpl):
    """Stock implementation over rotated scratch pages, and the fused decode kernel.

    Attributes:
        layer_rotary: Set by ``install_query_rotary``; ``None`` for a layer without RoPE.
    """

    layer_rotary: LayerRotary | None = None
    _views: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    _scratch: ClassVar[Scratch | None] = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpansFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Same arguments and shapes as the stock ``forward``; ``query`` is rotated, cached K is not."""
        if attn_metadata is None:
            return output.fill_(0)
        if self._views is None or self._views[0] is not kv_cache:
            # Kept: a view costs the host more than a kernel launch, and there are 32 layers of them in a step.
            self._views = (kv_cache, *kv_cache.transpose(1, 2).split(self.head_size, dim=-1))
        _, key_cache, value_cache = self._views
        rotary = self.layer_rotary
        cos_sin = rotary.cos_sin_cache if rotary is not None else None
        is_neox = rotary is None or rotary.is_neox
        decodes = attn_metadata.num_decodes
        if decodes:
            decode_attention(
                query[:decodes],
                key_cache,
                value_cache,
                attn_metadata.block_table[:decodes],
                attn_metadata.seq_lens[:decodes],
                cos_sin,
                is_neox,
                self.scale,
                output[:decodes],
                attn_metadata.workspace,
                window_left=self.sliding_window[0],
                softcap=float(self.logits_soft_cap),
                sinks=self.sinks,
            )
        for prefill in attn_metadata.passes:
            scratch = self._scratch
            assert scratch is not None, "the worker allocates it before the first step"
            gather_rotate(
                key_cache,
                value_cache,
                prefill.block_table,
                *prefill.groups,
                prefill.max_blocks,
                scratch.key,
                scratch.value,
                cos_sin,
                is_neox,
            )
            tokens = prefill.tokens
            super().forward(
                layer,
                query[tokens],
                key[tokens],
                value[tokens],
                scratch.pages,
                prefill.stock,
                output[tokens],
                output_scale,
                output_block_scale,
            )
        return output

    @classmethod
    def allocate_scratch(
        cls,
        vllm_config: VllmConfig,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> int:
        """Allocate the scratch cache, before vLLM measures how much memory is left for KV.

        Returns:
            Its size in bytes.
        """
        block_size = vllm_config.cache_config.block_size
        page_tokens = block_size * max(1, SCRATCH_PAGE_TOKENS // block_size)
        pages = torch.zeros(
            (scratch_pages(vllm_config, page_tokens), page_tokens, kv_heads, 2 * head_size),
            dtype=dtype,
            device=device,
        )
        blocks = pages.view(-1, block_size, kv_heads, 2 * head_size)
        cls._scratch = Scratch(pages.transpose(1, 2), *blocks.split(head_size, dim=-1))
        return pages.numel() * pages.element_size()


def scratch_pages(vllm_config: VllmConfig, page_tokens: int) -> int:
    """Pages of the scratch cache: one sequence of the greatest length and one step of isolated rows beside it."""
    tokens = (
        vllm_config.model_config.max_model_len + vllm_config.scheduler_config.max_num_batched_tokens
    )
    return -(-tokens // page_tokens) + vllm_config.scheduler_config.max_num_seqs
