"""Plain float64 versions of what the kernels compute, and random paged KV to run them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def rotate(
    key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor | None, is_neox: bool
) -> torch.Tensor:
    """Rotate ``[tokens, heads, head_size]`` in float64."""
    key = key.double()
    if table is None:
        return key
    half = table.shape[1] // 2
    rows = table.double()[positions.long().clamp(max=table.shape[0] - 1)]
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    out = key.clone()
    if is_neox:
        first, second = key[..., :half], key[..., half : 2 * half]
        out[..., :half] = first * cos - second * sin
        out[..., half : 2 * half] = second * cos + first * sin
    else:
        first, second = key[..., 0 : 2 * half : 2], key[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2] = first * cos - second * sin
        out[..., 1 : 2 * half : 2] = second * cos + first * sin
    return out


def cos_sin_table(
    positions: int, rotary_dim: int, dtype: torch.dtype, device: str
) -> torch.Tensor | None:
    """A table as vLLM makes them; ``None`` for a rotary dim of 0."""
    if rotary_dim == 0:
        return None
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000.0**exponent
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device=device, dtype=dtype)


def paged_kv(
    blocks: int,
    block_size: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    layout: str,
    device: str,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V views ``[blocks, block_size, heads, head_size]``, laid out as vLLM does.

    K and V of a token are interleaved in the last dimension; ``layout`` is "NHD", "HND" or "apart" (two tensors).
    """
    shape = {
        "NHD": (blocks, block_size, heads, 2 * head_size),
        "HND": (blocks, heads, block_size, 2 * head_size),
        "apart": (2, blocks, block_size, heads, head_size),
    }[layout]
    cache = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)
    if layout == "apart":
        return cache[0], cache[1]
    if layout == "HND":
        cache = cache.transpose(1, 2)
    return cache[..., :head_size], cache[..., head_size:]


def widen(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """To float64, dequantised when fp8."""
    wide = x.to(torch.float32).double() if x.dtype in FP8 else x.double()
    return wide * scale if x.dtype in FP8 else wide


def gather(
    cache: torch.Tensor, table: torch.Tensor, row: int, tokens: int, scale: float = 1.0
) -> torch.Tensor:
    """The first ``tokens`` tokens of a row, ``[tokens, heads, head_size]``, float64."""
    block_size = cache.shape[1]
    pages = -(-tokens // block_size)
    # Indexing fp8 is not implemented everywhere: pages are picked one at a time.
    picked = [widen(cache[int(block)], scale) for block in table[row, :pages]]
    if not picked:
        return torch.empty((0, *cache.shape[2:]), dtype=torch.float64, device=cache.device)
    return torch.cat(picked)[:tokens]


@dataclass(frozen=True)
class Attention:
    """What a decode call is asked for."""

    table: torch.Tensor | None
    is_neox: bool
    scale: float
    window_left: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: list[int],
    attention: Attention,
) -> torch.Tensor:
    """Decode attention in float64, row by row."""
    heads = query.shape[1]
    group = heads // key_cache.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for row, length in enumerate(seq_lens):
        if length == 0:
            continue
        positions = torch.arange(length, device=query.device)
        key = gather(key_cache, block_table, row, length, attention.k_scale)
        key = rotate(key, positions, attention.table, attention.is_neox)
        value = gather(value_cache, block_table, row, length, attention.v_scale)
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * attention.scale
        if attention.softcap:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        if attention.window_left >= 0:
            scores[:, positions < length - 1 - attention.window_left] = float("-inf")
        if attention.sinks is not None:
            scores = torch.cat([scores, attention.sinks.double()[:, None]], dim=1)
        weights = scores.softmax(-1)[:, :length]
        out[row] = torch.einsum("hn,nhd->hd", weights, value)
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|``; NaN where anything is NaN."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
