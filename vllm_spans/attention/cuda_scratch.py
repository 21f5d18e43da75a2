"""The scratch cache on CUDA: rotated pages of one step, shared by all layers, which run in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_spans.config import SpansConfig, SpansConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCRATCH_PAGE_TOKENS = 128
"""Tokens per scratch page. A group's pages are consecutive, so the stock kernel may read larger pages than blocks."""


@dataclass(frozen=True)
class ScratchShape:
    """Size of the scratch cache.

    Attributes:
        block_size: Tokens per block of the KV cache.
        blocks_per_page: Blocks per scratch page.
        pages: Scratch pages.
    """

    block_size: int
    blocks_per_page: int
    pages: int

    @property
    def page_tokens(self) -> int:
        """Tokens per scratch page."""
        return self.block_size * self.blocks_per_page

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ScratchShape:
        """Size for an engine.

        The default holds one sequence of the greatest length and beside it a step of isolated rows. A step that
        needs more runs in several passes.

        Raises:
            SpansConfigError: ``scratch_tokens`` does not hold the longest sequence.
        """
        block_size = vllm_config.cache_config.block_size
        blocks_per_page = max(1, SCRATCH_PAGE_TOKENS // block_size)
        page_tokens = block_size * blocks_per_page
        longest = vllm_config.model_config.max_model_len
        budget = SpansConfig.from_vllm_config(vllm_config).scratch_tokens
        if budget is None:
            scheduler = vllm_config.scheduler_config
            pages = -(-(longest + scheduler.max_num_batched_tokens) // page_tokens)
            return cls(block_size, blocks_per_page, pages + scheduler.max_num_seqs)
        if budget < longest:
            raise SpansConfigError(
                f"VLLM_V1_SPANS_SCRATCH_TOKENS={budget} does not hold the longest sequence of {longest} tokens. "
                f"Use at least {longest}, or set --max-model-len."
            )
        return cls(block_size, blocks_per_page, -(-budget // page_tokens))


@dataclass(frozen=True)
class Scratch:
    """The scratch cache.

    Attributes:
        pages: ``[pages, kv_heads, page tokens, 2 * head_size]``, as the stock kernel reads it.
        key: ``[blocks, block_size, kv_heads, head_size]``, as the gather writes it.
        value: Same shape.
    """

    pages: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def allocate(
        cls,
        shape: ScratchShape,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Scratch:
        """Allocate it, before vLLM measures how much memory is left for KV.

        Args:
            shape: Its size.
            kv_heads: KV heads on this rank.
            head_size: Elements per head.
            dtype: Of the model: quantised K and V are dequantised on the way.
            device: Of the model.
        """
        pages = torch.zeros(
            (shape.pages, shape.page_tokens, kv_heads, 2 * head_size), dtype=dtype, device=device
        )
        blocks = pages.view(-1, shape.block_size, kv_heads, 2 * head_size)
        return cls(pages.transpose(1, 2), *blocks.split(head_size, dim=-1))

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return self.pages.numel() * self.pages.element_size()
