"""Prevents wrong attention over un-rotated K: every case is compared with plain torch in float64."""

from __future__ import annotations

import types

import pytest
import torch
import vllm.config  # noqa: F401  (must come before the rotary modules)
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa

from vllm_spans.attention import cpu_backend
from vllm_spans.attention.cpu_backend import SpansCPUAttentionImpl, SpansCPUMetadata
from vllm_spans.attention.rotary import LayerRotary
from vllm_spans.attention.scratch import plan_scratch

BLOCK = 32
MAX_POSITION = 512

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="tests the CPU build of vLLM")


def cos_sin_cache(rotary_dim: int, scale: float = 1.0) -> torch.Tensor:
    inverse = 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(MAX_POSITION).double()[:, None] * inverse
    return (torch.cat((angles.cos(), angles.sin()), -1) * scale).float()


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, neox: bool
) -> torch.Tensor:
    """Plain rotation of ``[tokens, heads, head_size]`` in float64."""
    rotary_dim = cache.shape[1]
    cos, sin = (part[:, None, :] for part in cache.double()[positions].chunk(2, -1))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if neox:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((turned, rest), -1)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    scale: float,
    sinks: torch.Tensor | None,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of a slice that starts at ``start`` over all of ``key``, in float64.

    ``window`` is how many tokens a query sees, its own included.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(start, start + query.shape[0])[:, None] - torch.arange(key.shape[0])
    mask = (back < 0) | (back >= (window or key.shape[0]))
    scores = scores.masked_fill(mask[None], float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("max_pages", [1, 1000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary_dim", "neox", "sinks", "window", "softcap"),
    [
        (4, 4, 32, 32, True, False, None, 0.0),
        (8, 2, 64, 64, True, False, 1, 0.0),
        (6, 3, 64, 32, True, False, None, 1.5),
        (8, 2, 80, 32, False, False, 33, 0.0),
        (4, 1, 128, 128, False, True, None, 0.0),
        (4, 2, 96, 0, True, False, 40, 2.0),
        (8, 2, 64, 64, True, True, 70, 0.0),
        (8, 4, 64, 64, True, True, 31, 1.0),
    ],
)
@pytest.mark.parametrize("group_window", ["of all layers", "mixed"])
def test_rows_of_any_shape_match_float64(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    neox: bool,
    sinks: bool,
    window: int | None,
    softcap: float,
    group_window: str,
    max_pages: int,
) -> None:
    torch.manual_seed(heads * head_size + max_pages)
    if sinks:
        # As an engine with sinks sets it; the number of threads decides whether the kernel splits at all.
        monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    generator = torch.Generator().manual_seed(1)
    num_blocks = 24
    # Two rows share blocks at one place, one row shows the same blocks at another place, one is a decode row.
    tables = [[1, 2, 3, 4], [1, 2, 5], [7, 1, 2, 9, 10], [11]]
    slices = [(96, 32), (64, 7), (150, 1), (0, 20)]
    sink_values = torch.randn(heads, generator=generator) if sinks else None
    config = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=CompilationConfig())
    config.model_config = types.SimpleNamespace(dtype=torch.float32)  # type: ignore[assignment]
    with set_current_vllm_config(config):
        impl = SpansCPUAttentionImpl(
            heads,
            head_size,
            head_size**-0.5,
            kv_heads,
            None,
            window,
            "auto",
            logits_soft_cap=softcap or None,
            sinks=sink_values,
        )
    # What the step's metadata may count on: the window that all layers share, or none.
    shared = -1 if window is None or group_window == "mixed" else window
    cache = cos_sin_cache(rotary_dim, scale=1.25) if rotary_dim else None
    impl.layer_rotary = LayerRotary(cache, head_size, neox) if cache is not None else None
    monkeypatch.setattr(SpansCPUAttentionImpl, "_scratch", None)

    raw_key = torch.randn(num_blocks, BLOCK, kv_heads, head_size, generator=generator)
    raw_value = torch.randn(num_blocks, BLOCK, kv_heads, head_size, generator=generator)
    kv_cache = torch.full((num_blocks, kv_heads, BLOCK, 2 * head_size), float("nan"))
    layer = types.SimpleNamespace(
        isa=_get_attn_isa(torch.float32, BLOCK, head_size, "auto"),
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
    order = torch.randperm(num_blocks * BLOCK, generator=generator)
    flat_key, flat_value = raw_key.flatten(0, 1)[order], raw_value.flatten(0, 1)[order]
    skipped = torch.cat((order, torch.tensor([-1])))
    filler = torch.zeros(1, kv_heads, head_size)
    impl.do_kv_cache_update(
        layer, torch.cat((flat_key, filler)), torch.cat((flat_value, filler)), kv_cache, skipped
    )

    lens = torch.tensor([start + count for start, count in slices], dtype=torch.int32)
    width = max(map(len, tables))
    table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
    starts = torch.tensor(
        [0, *torch.tensor([c for _, c in slices]).cumsum(0).tolist()], dtype=torch.int32
    )
    builder = object.__new__(cpu_backend.SpansCPUMetadataBuilder)
    builder.num_heads, builder.num_kv_heads, builder.head_dim = heads, kv_heads, head_size
    builder.dtype, builder.window_size, builder.isa, builder.kv_cache_dtype = (
        torch.float32,
        shared,
        layer.isa,
        "auto",
    )
    stock = CPUAttentionMetadata(
        num_actual_tokens=int(starts[-1]),
        max_query_len=32,
        query_start_loc=starts,
        max_seq_len=int(lens.max()),
        seq_lens=lens,
        block_table=table,
        slot_mapping=torch.empty(0),
        scheduler_metadata=cpu_backend.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(slices),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_size,
            seq_lens=lens,
            dtype=torch.float32,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=shared,
            isa=layer.isa,
            enable_kv_split=False,
        ),
    )
    passes = plan_scratch(table, lens, BLOCK, max_pages, MAX_POSITION - 1)
    assert (len(passes) > 1) == (max_pages == 1)
    metadata = SpansCPUMetadata(
        **vars(stock),
        passes=[(scratch, builder._metadata_of(stock, scratch)) for scratch in passes],
    )
    query = torch.randn(int(starts[-1]), heads, head_size, generator=generator)
    output = torch.empty_like(query)
    impl.forward(layer, query, query, query, kv_cache, metadata, output)
    assert metadata.layers_done == 1

    for row, (start, count) in enumerate(slices):
        length = start + count
        key = torch.cat([raw_key[block] for block in tables[row]])[:length].double()
        value = torch.cat([raw_value[block] for block in tables[row]])[:length].double()
        if cache is not None:
            key = rotate(key, torch.arange(length), cache, neox)
        mine = slice(int(starts[row]), int(starts[row + 1]))
        expected = reference(
            query[mine].double(),
            key,
            value,
            start,
            head_size**-0.5,
            sink_values,
            window,
            softcap,
        )
        torch.testing.assert_close(output[mine].double(), expected, atol=2e-5, rtol=2e-5)
