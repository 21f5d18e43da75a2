"""The two kernels of decode attention: every program's share of the work, and the merge of a row's pieces."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import add_values, join_runs, key_scores, load_blocks, query_parts, tile_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def unseen_tiles(length, WINDOW_LEFT: tl.constexpr, TILE: tl.constexpr):
    """Tiles before the one that holds the first token in the window."""
    if WINDOW_LEFT >= 0:
        return tl.maximum(length - 1 - WINDOW_LEFT, 0) // TILE
    return length * 0


# Arguments that change from call to call must not ask for another compilation: it would come during graph capture.
@triton.jit(
    do_not_specialize=["rows", "last_position"],
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def decode_pieces_kernel(
    query,
    key,
    value,
    table,
    seq_lens,
    cos_sin,
    accumulators,
    maxima,
    sums,
    pieces_of_row,
    score_scale,
    softcap,
    rows,
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
    PARTS: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_E4M3: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILE: tl.constexpr = TOKENS * PARTS
    STREAMS: tl.constexpr = HEADS * PARTS * SLICES
    WIDTH: tl.constexpr = HEAD_PADDED // SLICES
    head_part = tl.program_id(0)
    program = tl.program_id(1)

    # The tiles of all rows stand in one line, row after row, and programs take shares of equal length: a share ends
    # inside a row and may hold several rows, so all programs end together however ragged the batch.
    index = tl.arange(0, MAX_ROWS)
    lengths = tl.load(seq_lens + index, mask=index < rows, other=0)
    tiles = tl.cdiv(lengths, TILE) - unseen_tiles(lengths, WINDOW_LEFT, TILE)
    total = tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total, tl.num_programs(1)), MIN_SHARE)
    begin = program * share
    if begin >= total:
        return
    end = tl.minimum(begin + share, total)
    ends = tl.cumsum(tiles, 0)
    first_row = tl.sum((ends <= begin).to(tl.int32), 0)
    last_row = tl.sum((ends < end).to(tl.int32), 0)
    row_begin = tl.sum(tl.where(ends <= begin, tiles, 0), 0)

    stream = tl.arange(0, STREAMS)
    head = (head_part * HEADS + stream // (PARTS * SLICES))[:, None]
    run = (stream // SLICES % PARTS * TOKENS)[:, None]
    part = (stream % SLICES)[:, None, None]
    key_of_head = key + head.to(tl.int64) * stride_kh
    value_of_head = value + head.to(tl.int64) * stride_vh
    token = tl.arange(0, TOKENS)[None, :]
    stream_of_head = tl.arange(0, PARTS * SLICES)
    place_in_tile = (stream_of_head // SLICES)[:, None] * TOKENS + token
    part_of_place = (stream_of_head % SLICES)[:, None, None]
    q_row = tl.arange(0, Q_ROWS)[None, :]
    q_type: tl.constexpr = query.dtype.element_ty
    # fp8 becomes fp16 in one instruction for two elements. Rotated e5m2 may leave the range of fp16.
    is_half: tl.constexpr = IS_FP8 and q_type.primitive_bitwidth == 16
    key_type: tl.constexpr = tl.float16 if is_half and IS_E4M3 else q_type
    value_type: tl.constexpr = tl.float16 if is_half else q_type
    out_slice = tl.arange(0, HEADS * SLICES)[:, None]
    out_head = (head_part * HEADS + out_slice // SLICES) * GROUP + q_row
    out_element = (out_slice % SLICES * WIDTH)[:, :, None] + tl.arange(0, WIDTH)[None, None, :]

    for row in tl.range(first_row, last_row + 1):
        length = tl.load(seq_lens + row)
        unseen = unseen_tiles(length, WINDOW_LEFT, TILE)
        row_end = row_begin + tl.cdiv(length, TILE) - unseen
        if length > 0:
            from_tile = tl.maximum(begin - row_begin, 0)
            low = (unseen + from_tile) * TILE
            high = tl.minimum((unseen + end - row_begin) * TILE, length)
            # Of two pieces the later one is in a later program or of a later row, so the sum numbers them.
            piece = program + row
            if (from_tile == 0) & (head_part == 0):
                tl.store(pieces_of_row + row * 2, piece)
                tl.store(pieces_of_row + row * 2 + 1, (row_end - 1) // share - program + 1)

            q_rows = query + tl.cast(row, tl.int64) * stride_qr + (head * GROUP + q_row) * stride_qh
            q_first, q_second, q_rest, q_largest = query_parts(
                q_rows[:, :, None],
                (q_row < GROUP)[:, :, None],
                PAIRS,
                PAIRS_PADDED,
                REST,
                REST_PADDED,
                IS_NEOX,
                WIDE,
                part,
                SLICES,
                key_type,
            )
            table_row = table + tl.cast(row, tl.int64) * stride_table
            accumulator = tl.zeros([STREAMS, WIDTH, Q_ROWS], tl.float32)
            maximum = tl.full([STREAMS, Q_ROWS], -1.0e30, tl.float32)
            weight = tl.zeros([STREAMS, Q_ROWS], tl.float32)
            # Blocks are looked up a tile ahead.
            block = load_blocks(table_row, low, run, high, PARTS, TOKENS, BLOCK_SIZE)
            for start in tl.range(low, high, TILE, num_stages=STAGES):
                position = start + run + token
                there = position < high
                rows_k = tile_rows(
                    key_of_head, block, start, run, stride_kb, stride_kt, TOKENS, BLOCK_SIZE
                )
                rows_v = tile_rows(
                    value_of_head, block, start, run, stride_vb, stride_vt, TOKENS, BLOCK_SIZE
                )
                block = load_blocks(table_row, start + TILE, run, high, PARTS, TOKENS, BLOCK_SIZE)
                scores = key_scores(
                    q_first,
                    q_second,
                    q_rest,
                    rows_k,
                    cos_sin,
                    stride_cos,
                    tl.minimum(start + place_in_tile, last_position),
                    part,
                    part_of_place,
                    HEADS,
                    SLICES,
                    PAIRS,
                    PAIRS_PADDED,
                    REST,
                    REST_PADDED,
                    IS_NEOX,
                    key_type,
                    WIDE,
                    PRECISION,
                )
                scores *= score_scale * q_largest
                if HAS_SOFTCAP:
                    # tanh by exp2, which is right for large arguments too: score_scale has 2 * log2(e) / softcap in it.
                    scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
                visible = there
                if WINDOW_LEFT >= 0:
                    visible = there & (position >= length - 1 - WINDOW_LEFT)
                visible = visible[:, :, None]
                scores = tl.where(visible, scores, -1.0e30)
                new_maximum = tl.maximum(maximum, tl.max(scores, 1))
                shrink = tl.exp2(maximum - new_maximum)
                # What a stream gathers before it sees a token has the maximum of masked scores, and shrinks to 0 later.
                weights = tl.exp2(scores - new_maximum[:, None, :])
                weight = weight * shrink + tl.sum(weights, 1)
                maximum = new_maximum
                accumulator = add_values(
                    accumulator * shrink[:, None, :],
                    weights,
                    rows_v,
                    there[:, :, None],
                    part,
                    HEAD_SIZE,
                    WIDTH,
                    SLICES,
                    value_type,
                    WIDE,
                    PRECISION,
                )

            accumulator, maximum, weight = join_runs(
                accumulator, maximum, weight, HEADS, PARTS, SLICES
            )
            slot = piece.to(tl.int64) * (tl.num_programs(0) * HEADS * GROUP) + out_head
            out_mask = q_row < GROUP
            tl.store(maxima + slot, maximum, mask=out_mask)
            tl.store(sums + slot, weight, mask=out_mask)
            tl.store(
                accumulators + slot[:, :, None] * HEAD_PADDED + out_element,
                tl.permute(accumulator, (0, 2, 1)),
                mask=out_mask[:, :, None],
            )
        row_begin = row_end


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "sinks"])
def merge_pieces_kernel(
    output,
    seq_lens,
    accumulators,
    maxima,
    sums,
    pieces_of_row,
    sinks,
    v_scale,
    stride_or,
    stride_oh,
    Q_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
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
    first = tl.load(pieces_of_row + row * 2).to(tl.int64)
    count = tl.load(pieces_of_row + row * 2 + 1)

    maximum = tl.full([HEADS], -1.0e30, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=there, other=-1.0e30).to(tl.float32) * LOG2E
        weight += 1.0
    result = tl.zeros([HEADS, HEAD_PADDED], tl.float32)
    for start in range(0, count, PIECES):
        index = start + tl.arange(0, PIECES)
        slots = (first + index)[:, None] * Q_HEADS + head[None, :]
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
