"""Tiles of paged K and V inside the decode kernel: addressing, scores with K rotated on the way, running softmax.

A tile is ``TOKENS`` tokens of ``HEADS`` KV heads; its rows are (token, head) pairs, token by token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotation import for_heads, load_cos_sin, load_pairs, rotate_pairs, split_pairs


@triton.jit
def operand(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Round to the dot's dtype; the interpreter has no bf16 dot, there the rounded value is widened again."""
    x = x.to(dtype)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def load_blocks(table_row, start, token, high, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Blocks of the tile at ``start``, a multiple of ``TOKENS``: one number where a page holds the whole tile."""
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(table_row + start // BLOCK_SIZE, mask=start < high, other=0)
    else:
        block = tl.load(
            table_row + (start + token) // BLOCK_SIZE, mask=start + token < high, other=0
        )
    return block.to(tl.int64)


@triton.jit
def tile_rows(
    base,
    block,
    start,
    token,
    stride_b,
    stride_t,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Pointers to the rows of the tile at ``start``; ``base`` points at heads of the first token of the cache.

    What does not change from tile to tile is left for the compiler to take out of the loop.
    """
    if BLOCK_SIZE % TOKENS == 0:
        rows = base + token * stride_t + (block * stride_b + start % BLOCK_SIZE * stride_t)
    elif TOKENS % BLOCK_SIZE == 0:
        rows = base + token % BLOCK_SIZE * stride_t + block * stride_b
    else:
        rows = base + (start + token) % BLOCK_SIZE * stride_t + block * stride_b
    return rows[:, None]


@triton.jit
def load_keys(
    rows,
    valid,
    cos_sin,
    stride_cos,
    position,
    position_valid,
    last_position,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """K of a tile with the cos and sin of its tokens; 0 stands for what the head does not have."""
    first, second, rest, cos, sin = 0, 0, 0, 0, 0
    if PAIRS > 0:
        first, second = load_pairs(rows, valid, PAIRS, PAIRS_PADDED, IS_NEOX)
        cos, sin = load_cos_sin(
            cos_sin,
            stride_cos,
            tl.minimum(position, last_position),
            position_valid,
            PAIRS,
            PAIRS_PADDED,
        )
    if REST > 0:
        extra = tl.arange(0, REST_PADDED)[None, :]
        mask = valid if REST == REST_PADDED else valid & (extra < REST)
        rest = tl.load(rows + 2 * PAIRS + extra, mask=mask, other=0.0)
    return first, second, rest, cos, sin


@triton.jit
def load_values(rows, valid, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr):
    """V of a tile."""
    element = tl.arange(0, HEAD_PADDED)[None, :]
    mask = valid if HEAD_SIZE == HEAD_PADDED else valid & (element < HEAD_SIZE)
    return tl.load(rows + element, mask=mask, other=0.0)


@triton.jit
def scores_of(
    q_first,
    q_second,
    q_rest,
    first,
    second,
    rest,
    cos,
    sin,
    score_scale,
    softcap,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    IS_NEOX: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    Q_ROWS: tl.constexpr,
    Q_TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of a tile in powers of two."""
    scores = tl.zeros([Q_ROWS, COLUMNS], tl.float32)
    if PAIRS > 0:
        first, second = split_pairs(first, second, PAIRS_PADDED, IS_NEOX)
        first, second = rotate_pairs(first, second, for_heads(cos, HEADS), for_heads(sin, HEADS))
        first = operand(first, Q_TYPE, WIDE)
        second = operand(second, Q_TYPE, WIDE)
        scores = tl.dot(q_first, tl.trans(first), scores, input_precision=PRECISION)
        scores = tl.dot(q_second, tl.trans(second), scores, input_precision=PRECISION)
    if REST > 0:
        if IS_FP8:
            rest = rest.to(tl.float32)
        rest = operand(rest, Q_TYPE, WIDE)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
    scores *= score_scale
    if HAS_SOFTCAP:
        # tanh by exp2, which is right for large arguments too; score_scale is 2 * log2(e) * scale / softcap.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def weigh(scores, visible, maximum, weight):
    """One turn of the running softmax: weights of a tile, what earlier sums shrink by, new maximum and sum."""
    scores = tl.where(visible, scores, -1.0e30)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shrink = tl.exp2(maximum - new_maximum)
    weights = tl.where(visible, tl.exp2(scores - new_maximum[:, None]), 0.0)
    return weights, shrink, new_maximum, weight * shrink + tl.sum(weights, 1)


@triton.jit
def add_values(
    weights,
    v,
    accumulator,
    shrink,
    IS_FP8: tl.constexpr,
    Q_TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a tile's weighted V."""
    if IS_FP8:
        v = v.to(tl.float32)
    return tl.dot(
        operand(weights, Q_TYPE, WIDE),
        operand(v, Q_TYPE, WIDE),
        accumulator * shrink[:, None],
        input_precision=PRECISION,
    )
