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

from dataclasses import dataclass, replace

import torch
import triton

from .decode_kernels import decode_chunks_kernel, merge_chunks_kernel
from .rotation import FP8_DTYPES, HeadSplit, check_paged

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
        registers: Most registers of a thread, 0 for no limit. Loads of a row's last tile would otherwise take so many
            that fewer programs fit a multiprocessor; what is spilled is outside the loop.
        heads: KV heads per tile; 0 for as many as fill the 16 rows of a dot.
    """

    columns: int
    warps: int
    stages: int
    programs: int
    registers: int = 0
    heads: int = 0


# By padded head size and bytes per KV element; found by the sweep of benchmarks/gpu_kernels.py. There is no
# triton.autotune: it would run inside graph capture and at start-up.
_CONFIGS = {
    (64, 2): DecodeConfig(columns=64, warps=4, stages=2, programs=4, heads=1),
    (128, 2): DecodeConfig(columns=128, warps=4, stages=2, programs=2, heads=1),
    (256, 2): DecodeConfig(columns=32, warps=4, stages=2, programs=4),
    (64, 1): DecodeConfig(columns=64, warps=4, stages=2, programs=2, registers=168),
    (128, 1): DecodeConfig(columns=64, warps=4, stages=2, programs=2, registers=168),
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
        if config is None:
            config = _CONFIGS.get((max(64, padded), kv_dtype.itemsize), _FALLBACK)
            if not config.heads and _heads_per_tile(kv_heads, group) < 4:
                # Few heads share cos and sin: in a tile of many tokens those would take as many registers as K.
                columns = 16 * _heads_per_tile(kv_heads, group)
                config = replace(config, columns=max(32, min(config.columns, columns)))
        heads = config.heads or _heads_per_tile(kv_heads, group)
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

    The query stands at position ``seq_lens - 1`` and sees what its window lets it see. Nothing is allocated, the host
    does not wait and the grid depends on host values only, so a CUDA graph may capture the call (after one call with
    the same workspace and layer outside of it: Triton compiles on the first).

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
            f"query {tuple(query.shape)} and KV {tuple(key_cache.shape)} do not fit a workspace of "
            f"{workspace.kv_heads} KV heads of {workspace.group} queries, head size {workspace.head_size}"
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
    decode_chunks_kernel[grid](
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
        maxnreg=config.registers or None,
    )
    # With few rows a program per head keeps enough of the device busy; with many, fewer and larger programs cost less.
    merge_heads = 1 if rows * q_heads <= 8 * workspace.multiprocessors else 4
    merge_chunks_kernel[(rows, triton.cdiv(q_heads, merge_heads))](
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
