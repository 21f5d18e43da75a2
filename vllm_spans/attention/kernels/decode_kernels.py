"""The two kernels of decode attention: chunks of rows, and the merge of a row's chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    add_values,
    load_blocks,
    load_keys,
    load_values,
    operand,
    scores_of,
    tile_rows,
    weigh,
)

LOG2E = tl.constexpr(1.4426950408889634)


# Arguments that change from call to call must not ask for another compilation: it would come during graph capture.
@triton.jit(
    do_not_specialize=["rows", "target_chunks", "last_position"],
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def decode_chunks_kernel(
    query,
    key,
    value,
    table,
    seq_lens,
    cos_sin,
    accumulators,
    maxima,
    sums,
    chunk_of_row,
    score_scale,
    softcap,
    rows,
    target_chunks,
    last_position,
    stride_qr,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    stride_cos,
    BLOCK_SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    head_part = tl.program_id(0)
    chunk = tl.program_id(1)

    # Which chunk is this? Rows count what their window lets them see; chunks are whole tiles.
    index = tl.arange(0, MAX_ROWS)
    lengths = tl.load(seq_lens + index, mask=index < rows, other=0)
    if WINDOW_LEFT >= 0:
        # From the start of the tile that holds the first token in the window.
        seen = lengths - tl.maximum(lengths - 1 - WINDOW_LEFT, 0) // TOKENS * TOKENS
    else:
        seen = lengths
    # int64: 1,024 rows of 4M tokens would not fit int32.
    total = tl.sum(seen.to(tl.int64), 0)
    size = tl.maximum((total + target_chunks - 1) // target_chunks, MIN_CHUNK).to(tl.int32)
    size = (size + TOKENS - 1) // TOKENS * TOKENS
    counts = (seen + size - 1) // size
    ends = tl.cumsum(counts, 0)
    row = tl.sum((ends <= chunk).to(tl.int32), 0)
    if row >= MAX_ROWS:
        return
    here = index == row
    count = tl.sum(tl.where(here, counts, 0), 0)
    if count == 0:
        return
    first_chunk = tl.sum(tl.where(here, ends - counts, 0), 0)
    length = tl.sum(tl.where(here, lengths, 0), 0)
    seen_here = tl.sum(tl.where(here, seen, 0), 0)
    # A row's chunks are made equal: the last one would otherwise be a short one that keeps a program for little.
    size = (seen_here + count - 1) // count
    size = (size + TOKENS - 1) // TOKENS * TOKENS
    first_seen = tl.maximum(length - 1 - WINDOW_LEFT, 0)
    low = length - seen_here + (chunk - first_chunk) * size
    high = tl.minimum(low + size, length)
    if (chunk == first_chunk) & (head_part == 0):
        tl.store(chunk_of_row + row * 2, first_chunk)
        tl.store(chunk_of_row + row * 2 + 1, count)

    q_type: tl.constexpr = query.dtype.element_ty
    q_row = tl.arange(0, Q_ROWS)
    q_head = q_row // GROUP
    q_valid = (q_row < HEADS * GROUP)[:, None]
    q_pointers = (
        query
        + row.to(tl.int64) * stride_qr
        + (head_part * HEADS * GROUP + q_row)[:, None] * stride_qh
    )
    q_first, q_second, q_rest = 0, 0, 0
    if PAIRS > 0:
        pair = tl.arange(0, PAIRS_PADDED)[None, :]
        q_mask = q_valid & (pair < PAIRS)
        step: tl.constexpr = 1 if IS_NEOX else 2
        other_half: tl.constexpr = PAIRS if IS_NEOX else 1
        q_first = operand(tl.load(q_pointers + pair * step, mask=q_mask, other=0.0), q_type, WIDE)
        q_second = operand(
            tl.load(q_pointers + pair * step + other_half, mask=q_mask, other=0.0), q_type, WIDE
        )
    if REST > 0:
        extra = tl.arange(0, REST_PADDED)
        q_rest = operand(
            tl.load(
                q_pointers + 2 * PAIRS + extra[None, :],
                mask=q_valid & (extra < REST)[None, :],
                other=0.0,
            ),
            q_type,
            WIDE,
        )

    COLUMNS: tl.constexpr = TOKENS * HEADS
    column = tl.arange(0, COLUMNS)
    own_head = q_head[:, None] == (column % HEADS)[None, :]
    column_token = column // HEADS
    token = tl.arange(0, TOKENS)
    head = (head_part * HEADS + column % HEADS).to(tl.int64)
    key_of_head = key + head * stride_kh
    value_of_head = value + head * stride_vh
    table_row = table + row.to(tl.int64) * stride_table
    everything = tl.full([COLUMNS, 1], True, tl.int1)
    all_tokens = tl.full([TOKENS], True, tl.int1)

    accumulator = tl.zeros([Q_ROWS, HEAD_PADDED], tl.float32)
    maximum = tl.full([Q_ROWS], -1.0e30, tl.float32)
    weight = tl.zeros([Q_ROWS], tl.float32)

    # Whole tiles need no mask, and only the last tile of a row is not whole. With PREFETCH the next tile is loaded into
    # registers while this one is worked on; otherwise Triton's pipeline copies tiles to shared memory ahead of time.
    whole_end = low + (high - low) // TOKENS * TOKENS
    block = load_blocks(table_row, low, column_token, high, TOKENS, BLOCK_SIZE)
    if PREFETCH:
        any_whole = low < whole_end
        rows_k = tile_rows(
            key_of_head, block, low, column_token, stride_kb, stride_kt, TOKENS, BLOCK_SIZE
        )
        rows_v = tile_rows(
            value_of_head, block, low, column_token, stride_vb, stride_vt, TOKENS, BLOCK_SIZE
        )
        first, second, rest, cos, sin = load_keys(
            rows_k,
            everything & any_whole,
            cos_sin,
            stride_cos,
            low + token,
            all_tokens & any_whole,
            last_position,
            PAIRS,
            PAIRS_PADDED,
            REST,
            REST_PADDED,
            IS_NEOX,
        )
        v = load_values(rows_v, everything & any_whole, HEAD_SIZE, HEAD_PADDED)
        block = load_blocks(table_row, low + TOKENS, column_token, high, TOKENS, BLOCK_SIZE)
    for start in tl.range(low, whole_end, TOKENS, num_stages=1 if PREFETCH else STAGES):
        tile = start + TOKENS if PREFETCH else start
        more = tile < whole_end
        rows_k = tile_rows(
            key_of_head, block, tile, column_token, stride_kb, stride_kt, TOKENS, BLOCK_SIZE
        )
        rows_v = tile_rows(
            value_of_head, block, tile, column_token, stride_vb, stride_vt, TOKENS, BLOCK_SIZE
        )
        if not PREFETCH:
            first, second, rest, cos, sin = load_keys(
                rows_k,
                everything,
                cos_sin,
                stride_cos,
                tile + token,
                all_tokens,
                last_position,
                PAIRS,
                PAIRS_PADDED,
                REST,
                REST_PADDED,
                IS_NEOX,
            )
            v = load_values(rows_v, everything, HEAD_SIZE, HEAD_PADDED)
        block = load_blocks(table_row, tile + TOKENS, column_token, high, TOKENS, BLOCK_SIZE)
        scores = scores_of(
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
            COLUMNS,
            HEADS,
            PAIRS,
            PAIRS_PADDED,
            REST,
            IS_NEOX,
            IS_FP8,
            HAS_SOFTCAP,
            Q_ROWS,
            q_type,
            WIDE,
            PRECISION,
        )
        if PREFETCH:
            first, second, rest, cos, sin = load_keys(
                rows_k,
                everything & more,
                cos_sin,
                stride_cos,
                tile + token,
                all_tokens & more,
                last_position,
                PAIRS,
                PAIRS_PADDED,
                REST,
                REST_PADDED,
                IS_NEOX,
            )
        visible = own_head
        if WINDOW_LEFT >= 0:
            visible = own_head & (start + column_token >= first_seen)[None, :]
        weights, shrink, maximum, weight = weigh(scores, visible, maximum, weight)
        accumulator = add_values(weights, v, accumulator, shrink, IS_FP8, q_type, WIDE, PRECISION)
        if PREFETCH:
            v = load_values(rows_v, everything & more, HEAD_SIZE, HEAD_PADDED)

    if whole_end < high:
        position = whole_end + column_token
        there = (position < high)[:, None]
        block = load_blocks(table_row, whole_end, column_token, high, TOKENS, BLOCK_SIZE)
        rows_k = tile_rows(
            key_of_head, block, whole_end, column_token, stride_kb, stride_kt, TOKENS, BLOCK_SIZE
        )
        rows_v = tile_rows(
            value_of_head, block, whole_end, column_token, stride_vb, stride_vt, TOKENS, BLOCK_SIZE
        )
        first, second, rest, cos, sin = load_keys(
            rows_k,
            there,
            cos_sin,
            stride_cos,
            whole_end + token,
            whole_end + token < high,
            last_position,
            PAIRS,
            PAIRS_PADDED,
            REST,
            REST_PADDED,
            IS_NEOX,
        )
        v = load_values(rows_v, there, HEAD_SIZE, HEAD_PADDED)
        scores = scores_of(
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
            COLUMNS,
            HEADS,
            PAIRS,
            PAIRS_PADDED,
            REST,
            IS_NEOX,
            IS_FP8,
            HAS_SOFTCAP,
            Q_ROWS,
            q_type,
            WIDE,
            PRECISION,
        )
        visible = own_head & (position < high)[None, :]
        if WINDOW_LEFT >= 0:
            visible = visible & (position >= first_seen)[None, :]
        weights, shrink, maximum, weight = weigh(scores, visible, maximum, weight)
        accumulator = add_values(weights, v, accumulator, shrink, IS_FP8, q_type, WIDE, PRECISION)

    slot = (chunk.to(tl.int64) * tl.num_programs(0) + head_part) * Q_ROWS + q_row
    tl.store(maxima + slot, maximum)
    tl.store(sums + slot, weight)
    tl.store(
        accumulators + slot[:, None] * HEAD_PADDED + tl.arange(0, HEAD_PADDED)[None, :], accumulator
    )


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "sinks"])
def merge_chunks_kernel(
    output,
    seq_lens,
    accumulators,
    maxima,
    sums,
    chunk_of_row,
    sinks,
    v_scale,
    stride_or,
    stride_oh,
    Q_HEADS: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    element = tl.arange(0, HEAD_PADDED)
    there = head < Q_HEADS
    out_pointers = (
        output + row.to(tl.int64) * stride_or + head[:, None] * stride_oh + element[None, :]
    )
    out_mask = there[:, None] & (element < HEAD_SIZE)[None, :]
    if tl.load(seq_lens + row) <= 0:
        # A padding row of a CUDA graph.
        zeros = tl.zeros([HEADS, HEAD_PADDED], output.dtype.element_ty)
        tl.store(out_pointers, zeros, mask=out_mask)
        return
    first = tl.load(chunk_of_row + row * 2).to(tl.int64)
    count = tl.load(chunk_of_row + row * 2 + 1)
    parts: tl.constexpr = Q_HEADS // ROW_HEADS
    slot = (first * parts + head // ROW_HEADS) * Q_ROWS + head % ROW_HEADS

    maximum = tl.full([HEADS], -1.0e30, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=there, other=-1.0e30).to(tl.float32) * LOG2E
        weight += 1.0
    result = tl.zeros([HEADS, HEAD_PADDED], tl.float32)
    for start in range(0, count, CHUNKS):
        index = start + tl.arange(0, CHUNKS)
        slots = slot[None, :] + index[:, None] * (parts * Q_ROWS)
        mask = (index < count)[:, None] & there[None, :]
        m = tl.load(maxima + slots, mask=mask, other=-1.0e30)
        w = tl.load(sums + slots, mask=mask, other=0.0)
        part = tl.load(
            accumulators + slots[:, :, None] * HEAD_PADDED + element[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(m, 0))
        shrink = tl.exp2(maximum - new_maximum)
        grow = tl.exp2(m - new_maximum[None, :])
        weight = weight * shrink + tl.sum(w * grow, 0)
        result = result * shrink[:, None] + tl.sum(part * grow[:, :, None], 0)
        maximum = new_maximum
    result = result / tl.where(there, weight, 1.0)[:, None] * v_scale
    tl.store(out_pointers, result.to(output.dtype.element_ty), mask=out_mask)
