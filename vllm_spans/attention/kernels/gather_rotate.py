"""Copies pages of un-rotated K and V into scratch pages, rotating K by its position on the way.

The stock attention kernel then runs on the scratch. One launch serves all requests of a pass: a *group* is a run of
scratch pages that is filled from one block-table row, and its page ``p`` holds positions ``p * block_size`` and on.

The kernel moves bytes and does little else, so what matters is 16-byte accesses and enough of them in flight: a program
takes ``tokens`` token slots (several pages where pages are small), loads their cos and sin once, and walks over heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rotation import (
    FP8_DTYPES,
    HeadSplit,
    check_paged,
    load_cos_sin,
    load_elements,
    load_pairs,
    rotate_pairs,
    split_pairs,
)


@dataclass(frozen=True)
class GatherConfig:
    """Launch shape of the gather, found by the sweep of ``benchmarks/gpu_kernels.py``.

    Attributes:
        tokens: Token slots per program, a power of two.
        heads: KV heads that one program walks over, one after the other.
        warps: Warps per program.
    """

    tokens: int
    heads: int
    warps: int


_CONFIG = GatherConfig(tokens=32, heads=4, warps=4)


@triton.jit
def _store_elements(rows, valid, x, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Store a tile where ``load_elements`` would load one, rounded to the output's dtype."""
    element = tl.arange(0, PADDED)[None, :]
    mask = valid if COUNT == PADDED else valid & (element < COUNT)
    tl.store(rows + element, x.to(rows.dtype.element_ty), mask=mask)


# Arguments that change from call to call must not ask for another compilation.
@triton.jit(do_not_specialize_on_alignment=["table", "rows", "pages", "offsets"])
def _gather_rotate_kernel(
    key,
    value,
    table,
    rows,
    pages,
    offsets,
    key_out,
    value_out,
    cos_sin,
    k_scale,
    v_scale,
    last_position,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    stride_okb,
    stride_okt,
    stride_okh,
    stride_ovb,
    stride_ovt,
    stride_ovh,
    stride_cos,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    IS_FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    # Programs that share tokens are neighbours in the grid: they read one stretch of memory and the same cos and sin.
    head_parts: tl.constexpr = (KV_HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    part = tl.program_id(0) % head_parts
    start = tl.program_id(0) // head_parts * TOKENS
    group = tl.program_id(1)
    slots = tl.load(pages + group) * BLOCK_SIZE
    if start >= slots:
        return
    slot = start + tl.arange(0, TOKENS)
    valid = slot < slots
    page = slot // BLOCK_SIZE
    inside = slot % BLOCK_SIZE
    row = tl.load(rows + group).to(tl.int64)
    block = tl.load(table + row * stride_table + page, mask=valid, other=0).to(tl.int64)
    target = tl.load(offsets + group).to(tl.int64) + page

    key_in = (key + block * stride_kb + inside * stride_kt)[:, None]
    value_in = (value + block * stride_vb + inside * stride_vt)[:, None]
    key_to = (key_out + target * stride_okb + inside * stride_okt)[:, None]
    value_to = (value_out + target * stride_ovb + inside * stride_ovt)[:, None]
    out_type = key_out.dtype.element_ty

    if PAIRS > 0:
        # Slots past the end of the table hold no token: a request's last page may reach beyond the longest context.
        position = tl.minimum(slot, last_position)
        cos, sin = load_cos_sin(cos_sin, stride_cos, position, valid, PAIRS, PAIRS_PADDED)
        cos = cos.to(tl.float32)
        sin = sin.to(tl.float32)

    valid = valid[:, None]
    first_head = part * HEADS_PER_PROGRAM
    for head in tl.static_range(0, HEADS_PER_PROGRAM):
        if KV_HEADS % HEADS_PER_PROGRAM == 0:
            there = valid
        else:
            there = valid & (first_head + head + tl.arange(0, 1)[None, :] < KV_HEADS)
        from_key = key_in + (first_head + head) * stride_kh
        to_key = key_to + (first_head + head) * stride_okh

        # All loads of a head come before its first use, so that they are in flight together.
        v = load_elements(value_in + (first_head + head) * stride_vh, there, HEAD_SIZE, HEAD_PADDED)
        if PAIRS > 0:
            first, second = load_pairs(from_key, there, PAIRS, PAIRS_PADDED, IS_NEOX)
        if REST > 0:
            rest = load_elements(from_key + 2 * PAIRS, there, REST, REST_PADDED)

        if IS_FP8:
            v = v.to(tl.float32) * v_scale
        to_value = value_to + (first_head + head) * stride_ovh
        _store_elements(to_value, there, v, HEAD_SIZE, HEAD_PADDED)
        if PAIRS > 0:
            first, second = split_pairs(first, second, PAIRS_PADDED, IS_NEOX)
            if IS_FP8:
                first *= k_scale
                second *= k_scale
            first, second = rotate_pairs(first, second, cos, sin)
            if IS_NEOX:
                _store_elements(to_key, there, first, PAIRS, PAIRS_PADDED)
                _store_elements(to_key + PAIRS, there, second, PAIRS, PAIRS_PADDED)
            else:
                both = tl.join(first.to(out_type), second.to(out_type))
                both = tl.reshape(both, (TOKENS, 2 * PAIRS_PADDED))
                _store_elements(to_key, there, both, 2 * PAIRS, 2 * PAIRS_PADDED)
        if REST > 0:
            if IS_FP8:
                rest = rest.to(tl.float32) * k_scale
            _store_elements(to_key + 2 * PAIRS, there, rest, REST, REST_PADDED)


def gather_rotate(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    group_rows: torch.Tensor,
    group_pages: torch.Tensor,
    group_offsets: torch.Tensor,
    max_pages: int,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    config: GatherConfig | None = None,
) -> None:
    """Gather pages into scratch and rotate their K by absolute position.

    Page ``p`` of group ``g`` comes from block ``block_table[group_rows[g], p]`` and goes to output page
    ``group_offsets[g] + p``; its slot ``i`` is position ``p * block_size + i``. Other output pages stay as they are.
    Nothing is allocated and the host does not wait, so a CUDA graph may capture the call.

    Args:
        key_cache: Un-rotated K, ``[blocks, block_size, kv_heads, head_size]``; any strides but the last, which is 1.
            fp16, bf16, float32, or fp8 (e4m3fn, e5m2), which is dequantised.
        value_cache: V, same shape and dtype.
        block_table: ``[rows, columns]``, int32.
        group_rows: ``[groups]``, int32: row of ``block_table``.
        group_pages: ``[groups]``, int32: pages to copy, may be 0.
        group_offsets: ``[groups]``, int32: first page in the output.
        max_pages: Upper bound of ``group_pages``, known on the host.
        key_out: ``[pages, block_size, kv_heads, head_size]``, fp16, bf16 or float32.
        value_out: Same shape and dtype as ``key_out``.
        cos_sin_cache: ``[max_position, rotary_dim]``, cos then sin; ``None`` copies K as it is.
        is_neox: Pairs are halves (neox) or neighbours (gptj).
        k_scale: fp8 K times this is K.
        v_scale: fp8 V times this is V.
        config: Launch shape, for the sweep.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.
    """
    check_paged(key_cache, value_cache)
    _, block_size, kv_heads, head_size = key_cache.shape
    if key_out.shape[1:] != key_cache.shape[1:] or value_out.shape != key_out.shape:
        raise ValueError(
            f"output pages {tuple(key_out.shape)}, {tuple(value_out.shape)} do not fit pages of "
            f"{tuple(key_cache.shape)}"
        )
    check_paged(key_out, value_out)
    is_fp8 = key_cache.dtype in FP8_DTYPES
    if key_out.dtype in FP8_DTYPES or (not is_fp8 and key_out.dtype != key_cache.dtype):
        raise ValueError(f"KV of {key_cache.dtype} cannot be gathered into {key_out.dtype}")
    if cos_sin_cache is not None and cos_sin_cache.stride(1) != 1:
        raise ValueError("the rows of cos_sin_cache have to be contiguous")
    if block_table.stride(1) != 1:
        raise ValueError("the rows of block_table have to be contiguous")
    groups = group_rows.shape[0]
    if groups == 0 or max_pages <= 0:
        return
    split = HeadSplit.of(head_size, cos_sin_cache)
    config = config or _CONFIG
    per_program = min(config.heads, kv_heads)
    tokens = min(config.tokens, triton.next_power_of_2(max_pages * block_size))
    parts = triton.cdiv(kv_heads, per_program)
    grid = (triton.cdiv(max_pages * block_size, tokens) * parts, groups)
    _gather_rotate_kernel[grid](
        key_cache,
        value_cache,
        block_table,
        group_rows,
        group_pages,
        group_offsets,
        key_out,
        value_out,
        cos_sin_cache,
        k_scale,
        v_scale,
        0 if cos_sin_cache is None else cos_sin_cache.shape[0] - 1,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        *key_out.stride()[:3],
        *value_out.stride()[:3],
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        PAIRS=split.pairs,
        PAIRS_PADDED=split.pairs_padded,
        REST=split.rest,
        REST_PADDED=split.rest_padded,
        IS_NEOX=is_neox,
        IS_FP8=is_fp8,
        TOKENS=tokens,
        HEADS_PER_PROGRAM=per_program,
        num_warps=config.warps,
    )
