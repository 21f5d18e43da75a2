"""Tiles of paged K and V inside the decode kernel: addressing, scores with K rotated on the way, running softmax.

A tile is ``PARTS`` runs of ``TOKENS`` tokens, for each of ``HEADS`` KV heads, whose elements lie in ``SLICES`` slices:
a wide head does not fit the registers of a warp. One slice of one run of one head is a *stream*: the first dimension of
all tensors here, ``[HEADS * PARTS * SLICES, ...]``, slice by slice within a run and run by run within a head. All that
streams exchange are the scores of slices, so that each can live in a warp of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotation import load_cos_sin, load_elements, load_pairs, rotate_pairs, split_pairs


@triton.jit
def operand(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Round to the dot's dtype; the interpreter has no bf16 dot, there the rounded value is widened again."""
    x = x.to(dtype)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def load_blocks(
    table_row,
    start,
    run,
    high,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Blocks of the tile at ``start``, a multiple of its size: as few numbers as its pages need.

    One for the tile, ``[streams, 1]`` or ``[streams, TOKENS]``; ``run`` is the place of a stream's run in the tile,
    ``[streams, 1]``.
    """
    if BLOCK_SIZE % (PARTS * TOKENS) == 0:
        first = start
    elif BLOCK_SIZE % TOKENS == 0:
        first = start + run
    else:
        first = start + run + tl.arange(0, TOKENS)[None, :]
    return tl.load(table_row + first // BLOCK_SIZE, mask=first < high, other=0).to(tl.int64)


@triton.jit
def tile_rows(
    base,
    block,
    start,
    run,
    stride_b,
    stride_t,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Pointers to the tokens of the tile at ``start``, ``[streams, TOKENS, 1]``.

    ``base`` points at the streams' heads of the first token of the cache, ``[streams, 1]``. What does not change from
    tile to tile is left for the compiler to take out of the loop.
    """
    token = tl.arange(0, TOKENS)[None, :]
    if BLOCK_SIZE == TOKENS:
        rows = base + token * stride_t + block * stride_b
    elif BLOCK_SIZE % TOKENS == 0:
        rows = base + token * stride_t + (block * stride_b + (start + run) % BLOCK_SIZE * stride_t)
    elif TOKENS % BLOCK_SIZE == 0:
        rows = base + token % BLOCK_SIZE * stride_t + block * stride_b
    else:
        rows = base + (start + run + token) % BLOCK_SIZE * stride_t + block * stride_b
    return rows[:, :, None]


@triton.jit
def for_heads(x, HEADS: tl.constexpr):
    """Repeat for the heads of a tile what they share: ``[PARTS * SLICES, ...]`` becomes ``[streams, ...]``."""
    if HEADS == 1:
        return x
    parts: tl.constexpr = x.shape[0]
    tokens: tl.constexpr = x.shape[1]
    width: tl.constexpr = x.shape[2]
    if parts == 1:
        return tl.broadcast_to(x, (HEADS, tokens, width))
    x = tl.broadcast_to(x[None, :, :, :], (HEADS, parts, tokens, width))
    return tl.reshape(x, (HEADS * parts, tokens, width))


@triton.jit
def query_parts(
    rows,
    valid,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    WIDE: tl.constexpr,
    part,
    SLICES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """The queries as ``key_scores`` multiplies them: first and second of the pairs, and the rest, each transposed.

    ``rows`` are pointers ``[streams, queries, 1]``, ``valid`` a mask and ``part`` the streams' slices, of that rank.
    0 stands for what the head does not have. Where ``DOT_TYPE`` has a smaller range than the queries' dtype they are
    divided by their largest element, which comes last, ``[streams, 1, queries]``, or is 1.
    """
    first, second, rest, largest = 0.0, 0.0, 0.0, 1.0
    if PAIRS > 0:
        pair = part * PAIRS_PADDED + tl.arange(0, PAIRS_PADDED)[None, :]
        mask = valid & (pair < PAIRS)
        step: tl.constexpr = 1 if IS_NEOX else 2
        other_half: tl.constexpr = PAIRS if IS_NEOX else 1
        first = tl.load(rows + pair * step, mask=mask, other=0.0)
        second = tl.load(rows + other_half + pair * step, mask=mask, other=0.0)
    if REST > 0:
        rest = load_elements(rows + 2 * PAIRS, valid, REST, REST_PADDED, part, SLICES)
    NARROW: tl.constexpr = DOT_TYPE.is_fp16() and not rows.dtype.element_ty.is_fp16()
    if NARROW:
        largest = 1e-30
        if PAIRS > 0:
            largest = tl.maximum(row_maximum(first, SLICES), largest)
            largest = tl.maximum(row_maximum(second, SLICES), largest)
        if REST > 0:
            largest = tl.maximum(row_maximum(rest, SLICES), largest)
        first, second, rest = first / largest, second / largest, rest / largest
    if PAIRS > 0:
        first = tl.permute(operand(first, DOT_TYPE, WIDE), (0, 2, 1))
        second = tl.permute(operand(second, DOT_TYPE, WIDE), (0, 2, 1))
    if REST > 0:
        rest = tl.permute(operand(rest, DOT_TYPE, WIDE), (0, 2, 1))
    if NARROW:
        largest = tl.permute(largest, (0, 2, 1))
    return first, second, rest, largest


@triton.jit
def row_maximum(x, SLICES: tl.constexpr):
    """Largest magnitude of each row over all slices, ``[streams, queries, 1]`` in fp32."""
    streams: tl.constexpr = x.shape[0]
    queries: tl.constexpr = x.shape[1]
    largest = tl.max(tl.abs(x.to(tl.float32)), 2)
    if SLICES > 1:
        apart: tl.constexpr = (streams // SLICES, SLICES, queries)
        largest = tl.max(tl.reshape(largest, apart), 1)
        largest = tl.reshape(tl.broadcast_to(largest[:, None, :], apart), (streams, queries))
    return largest[:, :, None]


@triton.jit
def key_scores(
    q_first,
    q_second,
    q_rest,
    rows,
    cos_sin,
    stride_cos,
    place,
    part,
    part_of_place,
    HEADS: tl.constexpr,
    SLICES: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of queries and rotated K, ``[streams, TOKENS, queries]`` in fp32.

    ``rows`` points at K of the tile's tokens, ``place`` are the positions of the streams of one head,
    ``[PARTS * SLICES, TOKENS]``: cos and sin are read once for all heads. ``part`` and ``part_of_place`` are the slices
    of both, ``[streams, 1, 1]`` and ``[PARTS * SLICES, 1, 1]``. Tokens past the row's end are read like others, which
    is cheaper: their memory exists, and the caller masks their scores.

    fp8 K that is multiplied in fp16 is rotated in fp16 too: it rounds less than K that is bf16 after rotation.
    """
    scores = None
    always = tl.full([1, 1, 1], True, tl.int1)
    is_half: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth == 8 and DOT_TYPE.is_fp16()
    rotation: tl.constexpr = tl.float16 if is_half else tl.float32
    if PAIRS > 0:
        first, second = load_pairs(rows, always, PAIRS, PAIRS_PADDED, IS_NEOX, part, SLICES)
        cos, sin = load_cos_sin(
            cos_sin,
            stride_cos,
            place,
            tl.full([1, 1], True, tl.int1),
            PAIRS,
            PAIRS_PADDED,
            part_of_place,
            SLICES,
        )
        first, second = split_pairs(first, second, PAIRS_PADDED, IS_NEOX, rotation)
        cos = for_heads(cos.to(rotation), HEADS)
        sin = for_heads(sin.to(rotation), HEADS)
        first, second = rotate_pairs(first, second, cos, sin, rotation)
        scores = tl.dot(operand(first, DOT_TYPE, WIDE), q_first, input_precision=PRECISION)
        second = operand(second, DOT_TYPE, WIDE)
        scores = tl.dot(second, q_second, scores, input_precision=PRECISION)
    if REST > 0:
        rest = load_elements(rows + 2 * PAIRS, always, REST, REST_PADDED, part, SLICES)
        rest = operand(rest.to(rotation), DOT_TYPE, WIDE)
        scores = tl.dot(rest, q_rest, scores, input_precision=PRECISION)
    return add_slices(scores, SLICES)


@triton.jit
def add_slices(scores, SLICES: tl.constexpr):
    """Give all slices of a run the sum of their scores, ``[streams, TOKENS, queries]``."""
    if SLICES == 1:
        return scores
    streams: tl.constexpr = scores.shape[0]
    tokens: tl.constexpr = scores.shape[1]
    queries: tl.constexpr = scores.shape[2]
    apart: tl.constexpr = (streams // SLICES, SLICES, tokens, queries)
    total = tl.sum(tl.reshape(scores, apart), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :, :], apart), (streams, tokens, queries))


@triton.jit
def add_values(
    accumulator,
    weights,
    rows,
    there,
    part,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a tile's weighted V to ``accumulator``, ``[streams, WIDTH, queries]``.

    ``weights`` are ``[streams, TOKENS, queries]``, ``rows`` points at V of the tile's tokens. V past the row's end is
    masked: no weight makes 0 of NaN.
    """
    element = part * WIDTH + tl.arange(0, WIDTH)[None, :, None]
    there = tl.permute(there, (0, 2, 1))
    mask = there if HEAD_SIZE == WIDTH * SLICES else there & (element < HEAD_SIZE)
    v = tl.load(tl.permute(rows, (0, 2, 1)) + element, mask=mask, other=0.0)
    return tl.dot(
        operand(v, DOT_TYPE, WIDE),
        operand(weights, DOT_TYPE, WIDE),
        accumulator,
        input_precision=PRECISION,
    )


@triton.jit
def join_runs(
    accumulator,
    maximum,
    weight,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Make one stream of the runs of each slice: the first dimension becomes ``HEADS * SLICES``."""
    if PARTS == 1:
        return accumulator, maximum, weight
    width: tl.constexpr = accumulator.shape[1]
    queries: tl.constexpr = accumulator.shape[2]
    slices: tl.constexpr = HEADS * SLICES
    maxima = tl.reshape(maximum, (HEADS, PARTS, SLICES, queries))
    highest = tl.max(maxima, 1)
    shrink = tl.exp2(maxima - highest[:, None, :, :])
    weight = tl.sum(tl.reshape(weight, (HEADS, PARTS, SLICES, queries)) * shrink, 1)
    accumulator = tl.reshape(accumulator, (HEADS, PARTS, SLICES, width, queries))
    accumulator = tl.sum(accumulator * shrink[:, :, :, None, :], 1)
    return (
        tl.reshape(accumulator, (slices, width, queries)),
        tl.reshape(highest, (slices, queries)),
        tl.reshape(weight, (slices, queries)),
    )
