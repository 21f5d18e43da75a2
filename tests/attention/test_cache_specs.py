"""Prevents: blocks that are freed behind a sliding window, or layers in more than one KV cache group."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_spans.attention.cache_specs import keep_all_blocks

SHAPE = {"block_size": 32, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}


def test_all_windows_become_one_full_kind() -> None:
    full = FullAttentionSpec(**SHAPE)
    kept = keep_all_blocks(
        {
            "layers.0": SlidingWindowSpec(**SHAPE, sliding_window=64),
            "layers.1": full,
            "layers.2": SlidingWindowSpec(**SHAPE, sliding_window=128),
        }
    )
    assert list(kept) == ["layers.0", "layers.1", "layers.2"]
    assert all(spec == full for spec in kept.values())
    assert is_kv_cache_spec_uniform(kept)


def test_another_kind_is_refused_by_name() -> None:
    chunked = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
    with pytest.raises(TypeError, match=r"layers\.1 has a ChunkedLocalAttentionSpec"):
        keep_all_blocks({"layers.0": FullAttentionSpec(**SHAPE), "layers.1": chunked})
