"""Decode attention over paged, un-rotated K: the rotation of K is fused into a split-KV kernel.

Decode is bound by reading KV once, so a rotated copy would double its cost. Three things keep the rotation hidden:

* Heads share a tile. The 16 rows that ``tl.dot`` needs are filled with the queries of several KV heads (4 heads of 4
  queries, say); a tile's columns are (token, KV head) pairs, and a row sees the columns of its own head. The dot costs
  what padding one head to 16 rows costs, and cos and sin are read once for all heads of the tile. Read per head
  they would be as many bytes as K.
* Work is cut on the device. Each program derives from ``seq_lens`` which chunk of which row is its own: all chunks
  are about as long, however ragged the batch. The grid depends on host bounds only, so CUDA graphs may capture it.
* The scales of fp8 K and V are applied to scores and output, not to elements.

A second kernel merges the chunks of a row.
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
    for_heads,
    load_cos_sin,
    load_pairs,
    rotate_pairs,
    split_pairs,
)

LOG2E = 1.4426950408889634

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class DecodeConfig:
    """Launch shape of the decode kernel.

    Attributes:
        columns: (token, KV head) pairs in one tile, a power of two.
        warps: Warps per program.
        stages: Depth of Triton's pipeline; 0 keeps the next tile in registers instead.
        programs: Programs per multiprocessor that the work is cut into.
    """

    columns: int
    warps: int
    stages: int
    programs: int


# By padded head size and bytes per KV element; found by the sweep of benchmarks/gpu_kernels.py. There is no
# triton.autotune: it would run inside graph capture and at start-up.
_CONFIGS = {
    (64, 2): DecodeConfig(columns=128, warps=4, stages=3, programs=4),
    (128, 2): DecodeConfig(columns=64, warps=4, stages=3, programs=4),
    (256, 2): DecodeConfig(columns=32, warps=4, stages=2, programs=4),
    (64, 1): DecodeConfig(columns=128, warps=4, stages=3, programs=4),
    (128, 1): DecodeConfig(columns=64, warps=4, stages=3, programs=4),
    (256, 1): DecodeConfig(columns=32, warps=4, stages=2, programs=4),
}
_FALLBACK = DecodeConfig(columns=32, warps=4, stages=2, programs=4)

_MIN_CHUNK = 64
"""Tokens below which a chunk is not worth a program of its own."""

_CPU_MULTIPROCESSORS = 4
"""Stands in for a GPU's count under Triton's interpreter."""


def _heads_per_tile(kv_heads: int, group: int) -> int:
    """KV heads whose queries fit the 16 rows of one dot: a power of two that divides the heads."""
    heads = 1
    while 2 * heads * group <= 16 and kv_heads % (2 * heads) == 0:
        heads *= 2
    return heads


@dataclass(frozen=True)
class DecodeWorkspace:
    """Buffers between the two kernels, allocated once and shared by all layers of one shape.

    Attributes:
        accumulators: ``[chunks, kv_heads / heads, rows_padded, head_padded]``, float32, not normalised.
        maxima: ``[chunks, kv_heads / heads, rows_padded]``: largest score, in powers of two.
        sums: Same shape: sum of the weights.
        chunk_of_row: ``[max_rows, 2]``, int32: first chunk and number of chunks of a row.
        max_rows: Most rows of a call.
        max_seq_len: Longest row.
        kv_heads: KV heads.
        group: Query heads per KV head.
        head_size: Elements per head.
        heads: KV heads per tile.
        target_chunks: Chunks that a batch is cut into, before rows are rounded up to whole chunks.
        multiprocessors: Multiprocessors of the device.
        config: Launch shape; ``None`` takes it from the table by head size and dtype.
    """

    accumulators: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    chunk_of_row: torch.Tensor
    max_rows: int
    max_seq_len: int
    kv_heads: int
    group: int
    head_size: int
    heads: int
    target_chunks: int
    multiprocessors: int
    config: DecodeConfig

    @classmethod
    def create(
        cls,
        max_rows: int,
        kv_heads: int,
        group: int,
        head_size: int,
        max_seq_len: int,
        device: torch.device | str,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
        config: DecodeConfig | None = None,
    ) -> DecodeWorkspace:
        """Allocate the buffers.

        Args:
            max_rows: Most rows of a call, padding rows included.
            kv_heads: KV heads on this rank.
            group: Query heads per KV head.
            head_size: Elements per head.
            max_seq_len: Longest row.
            device: Where the kernels run.
            kv_dtype: Dtype of the KV cache, which the launch shape depends on.
            config: Launch shape, for the sweep.

        Returns:
            The workspace.

        Raises:
            ValueError: A size is not positive.
        """
        if min(max_rows, kv_heads, group, head_size, max_seq_len) < 1:
            raise ValueError("a decode workspace needs positive sizes")
        device = torch.device(device)
        if device.type == "cuda":
            count = torch.cuda.get_device_properties(device).multi_processor_count
        else:
            count = _CPU_MULTIPROCESSORS
        padded = max(16, triton.next_power_of_2(head_size))
        config = config or _CONFIGS.get((max(64, padded), kv_dtype.itemsize), _FALLBACK)
        heads = _heads_per_tile(kv_heads, group)
        target = triton.cdiv(count * config.programs * heads, kv_heads)
        chunks = min(target + max_rows, max_rows * triton.cdiv(max_seq_len, _MIN_CHUNK))
        rows_padded = max(16, triton.next_power_of_2(heads * group))
        shape = (chunks, kv_heads // heads, rows_padded)
        return cls(
            accumulators=torch.empty((*shape, padded), dtype=torch.float32, device=device),
            maxima=torch.empty(shape, dtype=torch.float32, device=device),
            sums=torch.empty(shape, dtype=torch.float32, device=device),
            chunk_of_row=torch.empty((max_rows, 2), dtype=torch.int32, device=device),
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            kv_heads=kv_heads,
            group=group,
            head_size=head_size,
            heads=heads,
            target_chunks=target,
            multiprocessors=count,
            config=config,
        )

    def chunks_of(self, rows: int) -> int:
        """Most chunks that ``rows`` rows are cut into, whatever their lengths: the grid of a launch."""
        return min(self.target_chunks + rows, rows * triton.cdiv(self.max_seq_len, _MIN_CHUNK))


@triton.jit
def _operand(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Round to the dot's dtype; the interpreter has no bf16 dot, there the rounded value is widened again."""
    x = x.to(dtype)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def _load_blocks(table_row, start, token, high, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Blocks of the tile at ``start``, a multiple of ``TOKENS``: one number where a page holds the whole tile."""
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(table_row + start // BLOCK_SIZE, mask=start < high, other=0)
    else:
        block = tl.load(
            table_row + (start + token) // BLOCK_SIZE, mask=start + token < high, other=0
        )
    return block.to(tl.int64)


@triton.jit
def _tile_rows(
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
def _load_keys(
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
def _load_values(rows, valid, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr):
    """V of a tile."""
    element = tl.arange(0, HEAD_PADDED)[None, :]
    mask = valid if HEAD_SIZE == HEAD_PADDED else valid & (element < HEAD_SIZE)
    return tl.load(rows + element, mask=mask, other=0.0)


@triton.jit
def _scores(
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
        first = _operand(first, Q_TYPE, WIDE)
        second = _operand(second, Q_TYPE, WIDE)
        scores = tl.dot(q_first, tl.trans(first), scores, input_precision=PRECISION)
        scores = tl.dot(q_second, tl.trans(second), scores, input_precision=PRECISION)
    if REST > 0:
        if IS_FP8:
            rest = rest.to(tl.float32)
        rest = _operand(rest, Q_TYPE, WIDE)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
    scores *= score_scale
    if HAS_SOFTCAP:
        # tanh by exp2, which is right for large arguments too; score_scale is 2 * log2(e) * scale / softcap.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def _weigh(scores, visible, maximum, weight):
    """One turn of the running softmax: weights of a tile, what earlier sums shrink by, new maximum and sum."""
    scores = tl.where(visible, scores, -1.0e30)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shrink = tl.exp2(maximum - new_maximum)
    weights = tl.where(visible, tl.exp2(scores - new_maximum[:, None]), 0.0)
    return weights, shrink, new_maximum, weight * shrink + tl.sum(weights, 1)


@triton.jit
def _add_values(
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
        _operand(weights, Q_TYPE, WIDE),
        _operand(v, Q_TYPE, WIDE),
        accumulator * shrink[:, None],
        input_precision=PRECISION,
    )


# Arguments that change from call to call must not ask for another compilation: it would come during graph capture.
@triton.jit(
    do_not_specialize=["rows", "target_chunks", "last_position"],
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def _decode_chunks_kernel(
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
        q_first = _operand(tl.load(q_pointers + pair * step, mask=q_mask, other=0.0), q_type, WIDE)
        q_second = _operand(
            tl.load(q_pointers + pair * step + other_half, mask=q_mask, other=0.0), q_type, WIDE
        )
    if REST > 0:
        extra = tl.arange(0, REST_PADDED)
        q_rest = _operand(
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
    block = _load_blocks(table_row, low, column_token, high, TOKENS, BLOCK_SIZE)
    if PREFETCH:
        any_whole = low < whole_end
        rows_k = _tile_rows(key_of_head, block, low, column_token, stride_kb, stride_kt, TOKENS, BLOCK_SIZE)
        rows_v = _tile_rows(value_of_head, block, low, column_token, stride_vb, stride_vt, TOKENS, BLOCK_SIZE)
        first, second, rest, cos, sin = _load_keys(rows_k, everything & any_whole, cos_sin, stride_cos, low + token, all_tokens & any_whole, last_position, PAIRS,PAIRS_PADDED,REST,REST_PADDED,IS_NEOX)
        v = _load_values(rows_v, everything & any_whole, HEAD_SIZE, HEAD_PADDED)
        block = _load_blocks(table_row, low + TOKENS, column_token, high, TOKENS, BLOCK_SIZE)
    for start in tl.range(low, whole_end, TOKENS, num_stages=1 if PREFETCH else STAGES):
        tile = start + TOKENS if PREFETCH else start
        more = tile < whole_end
        rows_k = _tile_rows(key_of_head, block, tile, column_token, stride_kb, stride_kt, TOKENS, BLOCK_SIZE)
        rows_v = _tile_rows(value_of_head, block, tile, column_token, stride_vb, stride_vt, TOKENS, BLOCK_SIZE)
        if not PREFETCH:
            first, second, rest, cos, sin = _load_keys(rows_k, everything, cos_sin, stride_cos, tile + token, all_tokens, last_position, PAIRS,PAIRS_PADDED,REST,REST_PADDED,IS_NEOX)
            v = _load_values(rows_v, everything, HEAD_SIZE, HEAD_PADDED)
        block = _load_blocks(table_row, tile + TOKENS, column_token, high, TOKENS, BLOCK_SIZE)
        scores = _scores(q_first, q_second, q_rest, first, second, rest, cos, sin, score_scale, softcap, COLUMNS,HEADS,PAIRS,PAIRS_PADDED,REST,IS_NEOX,IS_FP8,HAS_SOFTCAP,Q_ROWS,q_type,WIDE,PRECISION)
        if PREFETCH:
            first, second, rest, cos, sin = _load_keys(rows_k, everything & more, cos_sin, stride_cos, tile + token, all_tokens & more, last_position, PAIRS,PAIRS_PADDED,REST,REST_PADDED,IS_NEOX)
        visible = own_head
        if WINDOW_LEFT >= 0:
            visible = own_head & (start + column_token >= first_seen)[None, :]
        weights, shrink, maximum, weight = _weigh(scores, visible, maximum, weight)
        accumulator = _add_values(weights, v, accumulator, shrink, IS_FP8, q_type, WIDE, PRECISION)
        if PREFETCH:
            v = _load_values(rows_v, everything & more, HEAD_SIZE, HEAD_PADDED)

    if whole_end < high:
        position = whole_end + column_token
        there = (position < high)[:, None]
        block = _load_blocks(table_row, whole_end, column_token, high, TOKENS, BLOCK_SIZE)
        rows_k = _tile_rows(key_of_head, block, whole_end, column_token, stride_kb, stride_kt, TOKENS, BLOCK_SIZE)
        rows_v = _tile_rows(value_of_head, block, whole_end, column_token, stride_vb, stride_vt, TOKENS, BLOCK_SIZE)
        first, second, rest, cos, sin = _load_keys(rows_k, there, cos_sin, stride_cos, whole_end + token, whole_end + token < high, last_position, PAIRS,PAIRS_PADDED,REST,REST_PADDED,IS_NEOX)
        v = _load_values(rows_v, there, HEAD_SIZE, HEAD_PADDED)
        scores = _scores(q_first, q_second, q_rest, first, second, rest, cos, sin, score_scale, softcap, COLUMNS,HEADS,PAIRS,PAIRS_PADDED,REST,IS_NEOX,IS_FP8,HAS_SOFTCAP,Q_ROWS,q_type,WIDE,PRECISION)
        visible = own_head & (position < high)[None, :]
        if WINDOW_LEFT >= 0:
            visible = visible & (position >= first_seen)[None, :]
        weights, shrink, maximum, weight = _weigh(scores, visible, maximum, weight)
        accumulator = _add_values(weights, v, accumulator, shrink, IS_FP8, q_type, WIDE, PRECISION)

    slot = (chunk.to(tl.int64) * tl.num_programs(0) + head_part) * Q_ROWS + q_row
    tl.store(maxima + slot, maximum)
    tl.store(sums + slot, weight)
    tl.store(
        accumulators + slot[:, None] * HEAD_PADDED + tl.arange(0, HEAD_PADDED)[None, :], accumulator
    )


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "sinks"])
def _merge_chunks_kernel(
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
        maximum = (
            tl.load(sinks + head, mask=there, other=-1.0e30).to(tl.float32) * 1.4426950408889634
        )
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


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
    scale: float,
    output: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attention of one query token per row over paged K that is rotated on the way.

    The query stands at position ``seq_lens - 1`` and sees what its window lets it see. Nothing is allocated, the host does
    not wait and the grid depends on host values only, so a CUDA graph may capture the call (after one call of the
    same shape outside: Triton compiles on the first).

    Args:
        query: ``[rows, heads, head_size]``, rotated already; heads of one KV head are neighbours.
        key_cache: Un-rotated K, ``[blocks, block_size, kv_heads, head_size]``; any strides but the last, which is 1.
            fp16, bf16, float32 like the query, or fp8 (e4m3fn, e5m2).
        value_cache: V, same shape and dtype.
        block_table: ``[rows, columns]``, int32.
        seq_lens: ``[rows]``, int32; 0 marks a padding row, whose output is zeros.
        cos_sin_cache: ``[max_position, rotary_dim]``, cos then sin; ``None`` for no RoPE.
        is_neox: Pairs are halves (neox) or neighbours (gptj).
        scale: Factor of the scores.
        output: Like ``query``.
        workspace: Of the same KV heads, group and head size; calls that may run at one time need their own.
        window_left: Tokens before its own that a query sees; negative for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for none.
        sinks: ``[heads]``: logits that take part in the softmax and carry no value.
        k_scale: fp8 K times this is K.
        v_scale: fp8 V times this is V.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit each other or the workspace.
    """
    check_paged(key_cache, value_cache)
    rows, q_heads, head_size = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    if (kv_heads, head_size) != (workspace.kv_heads, workspace.head_size) or (
        key_cache.shape[3] != head_size or q_heads != kv_heads * workspace.group
    ):
        raise ValueError(
            f"query {tuple(query.shape)} and KV {tuple(key_cache.shape)} do not fit a workspace of {workspace.kv_heads} KV "
            f"heads of {workspace.group} queries, head size {workspace.head_size}"
        )
    if rows > workspace.max_rows:
        raise ValueError(f"{rows} rows do not fit a workspace of {workspace.max_rows}")
    if output.shape != query.shape or output.stride(2) != 1 or query.stride(2) != 1:
        raise ValueError("query and output need one shape and contiguous heads")
    is_fp8 = key_cache.dtype in FP8_DTYPES
    if not is_fp8 and key_cache.dtype != query.dtype:
        raise ValueError(f"a query of {query.dtype} does not fit KV of {key_cache.dtype}")
    if cos_sin_cache is not None and cos_sin_cache.stride(1) != 1:
        raise ValueError("the rows of cos_sin_cache have to be contiguous")
    if block_table.stride(1) != 1 or seq_lens.stride(0) != 1:
        raise ValueError("seq_lens and the rows of block_table have to be contiguous")
    if rows == 0:
        return
    split = HeadSplit.of(head_size, cos_sin_cache, smallest=16)
    config = workspace.config
    heads, group = workspace.heads, workspace.group
    rows_padded, head_padded = workspace.accumulators.shape[2:]
    tokens = max(1, config.columns // heads)
    score_scale = scale * k_scale * LOG2E
    if softcap > 0.0:
        score_scale *= 2.0 / softcap
    grid = (kv_heads // heads, workspace.chunks_of(rows))
    _decode_chunks_kernel[grid](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cos_sin_cache,
        workspace.accumulators,
        workspace.maxima,
        workspace.sums,
        workspace.chunk_of_row,
        score_scale,
        softcap * LOG2E,
        rows,
        workspace.target_chunks,
        0 if cos_sin_cache is None else cos_sin_cache.shape[0] - 1,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        BLOCK_SIZE=block_size,
        MAX_ROWS=triton.next_power_of_2(workspace.max_rows),
        HEADS=heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PADDED=head_padded,
        PAIRS=split.pairs,
        PAIRS_PADDED=split.pairs_padded,
        REST=split.rest,
        REST_PADDED=split.rest_padded,
        IS_NEOX=is_neox,
        IS_FP8=is_fp8,
        WINDOW_LEFT=max(window_left, -1),
        HAS_SOFTCAP=softcap > 0.0,
        MIN_CHUNK=_MIN_CHUNK,
        TOKENS=tokens,
        Q_ROWS=rows_padded,
        WIDE=_INTERPRETED,
        PRECISION="ieee",
        STAGES=config.stages,
        PREFETCH=config.stages == 0,
        num_warps=config.warps,
    )
    # With few rows a program per head keeps enough of the device busy; with many, fewer and larger programs cost less.
    merge_heads = 1 if rows * q_heads <= 8 * workspace.multiprocessors else 4
    _merge_chunks_kernel[(rows, triton.cdiv(q_heads, merge_heads))](
        output,
        seq_lens,
        workspace.accumulators,
        workspace.maxima,
        workspace.sums,
        workspace.chunk_of_row,
        sinks,
        v_scale,
        *output.stride()[:2],
        Q_HEADS=q_heads,
        ROW_HEADS=heads * group,
        Q_ROWS=rows_padded,
        HEAD_SIZE=head_size,
        HEAD_PADDED=head_padded,
        HAS_SINKS=sinks is not None,
        HEADS=merge_heads,
        CHUNKS=32 if merge_heads == 1 else 8,
        num_warps=4,
    )
