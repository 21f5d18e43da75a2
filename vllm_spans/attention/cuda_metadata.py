"""Metadata of a step on CUDA: which rows decode, and where the pages of the others lie in the scratch cache.

Prefill, gap and isolated rows read rotated pages from a scratch cache, and the stock kernel gets metadata of its own
over that. Decode rows read K once, so they go through a kernel that rotates it on the way, which CUDA graphs capture.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVQuantMode

from vllm_spans.attention.cuda_scratch import ScratchShape
from vllm_spans.attention.gather_plan import GatherPass, plan_gather
from vllm_spans.attention.kernels.decode import DecodeWorkspace
from vllm_spans.attention.kv_dtype import kernel_dtype
from vllm_spans.core.rows import group_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


class StepRows(threading.local):
    """Ids of the rows of the step whose attention metadata is being built, in batch order.

    The runner knows them, the metadata builder is not told.
    """

    ids: list[str] | None = None


step_rows = StepRows()


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
    stock: Any


@dataclass
class SpansCudaMetadata:
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


class SpansCudaMetadataBuilder(AttentionMetadataBuilder[SpansCudaMetadata]):
    """Splits a step into decode and prefill rows and places the latter in the scratch cache.

    Subclasses name the stock builder.

    Attributes:
        workspace: Of the decode kernel, for all layers.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    stock_builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._block_size = kv_cache_spec.block_size
        self._scratch = ScratchShape.of(vllm_config)
        self._stock = self._make_stock_builder(vllm_config)
        self.workspace = DecodeWorkspace.create(
            max_rows=max(
                scheduler.max_num_seqs,
                vllm_config.compilation_config.max_cudagraph_capture_size or 0,
            ),
            kv_heads=kv_cache_spec.num_kv_heads,
            group=layer.num_heads // layer.num_kv_heads,
            head_size=kv_cache_spec.head_size,
            max_seq_len=model.max_model_len,
            device=device,
            kv_dtype=kernel_dtype(vllm_config.cache_config.cache_dtype) or model.dtype,
            query_dtype=model.dtype,
        )
        self._columns = torch.arange(self._scratch.pages + 1, dtype=torch.int32, device=device)

    def _make_stock_builder(self, vllm_config: VllmConfig) -> AttentionMetadataBuilder[Any]:
        """The stock builder as it would be for an engine whose cache is the scratch cache."""
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(vllm_config.cache_config)
        config.cache_config.cache_dtype = "auto"
        # Prefill never runs inside a full graph, so its schedule needs no buffer at a fixed address.
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        page = replace(
            self.kv_cache_spec,
            block_size=self._scratch.page_tokens,
            dtype=vllm_config.model_config.dtype,
            kv_quant_mode=KVQuantMode.NONE,
            page_size_padded=None,
        )
        return self.stock_builder_cls(page, self.layer_names, config, self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpansCudaMetadata:
        common = common_attn_metadata
        num_decodes = common.num_reqs
        if common.max_query_len > 1:
            starts = common.query_start_loc_cpu.numpy()
            num_decodes = int(np.argmax(np.diff(starts[: common.num_reqs + 1]) > 1))
        return SpansCudaMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            passes=self._passes(common, num_decodes) if num_decodes < common.num_reqs else [],
            workspace=self.workspace,
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
            groups, seq_lens, self._block_size, self._scratch.blocks_per_page, self._scratch.pages
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
        pinned = torch.from_numpy(host).pin_memory() if PIN_MEMORY else torch.from_numpy(host)
        device = pinned.to(self.device, non_blocking=True)
        rows, blocks, offsets, row_pages = device.split([num_groups] * 3 + [num_rows])
        max_len = int(seq_lens[plan.first_row : plan.last_row].max())
        width = -(-max_len // self._scratch.page_tokens)
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
                    max=self._scratch.pages - 1
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
