"""Decode attention over paged, un-rotated K: the rotation of K is fused into a split-KV kernel.

Decode is bound by reading KV once, so a rotated copy would double its cost. Four things keep the rotation hidden:

* Several KV heads share a program and with it cos and sin, which read per head would be as many bytes as K.
* Each warp has a *stream* of its own, one KV head's share of a tile (``tiles.py``). K goes from shared memory to the
  tensor cores' registers in the one layout in which it is rotated. Nothing crosses warps in the loop but the scores of
  heads wider than 128 elements, of which a warp holds a slice.
* Work is cut on the device. Each program derives from ``seq_lens`` which stretch of the batch's tiles is its own: all
  stretches are equally long, however ragged the batch, and there are as many as run at one time. The grid depends on
  host bounds only, so CUDA graphs may capture it.
* The scales of fp8 K and V are applied to scores and output, not to elements.

A second kernel merges the pieces of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .decode_kernels import decode_pieces_kernel, merge_pieces_kernel
from .rotation import FP8_DTYPES, HeadSplit, check_paged

LOG2E = 1.4426950408889634

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class DecodeConfig:
    """Launch shape of the decode kernel.

    Attributes:
        tokens: Tokens of a stream in one tile, a power of two from 16.
        heads: Most KV heads of a program, a power of two; fewer where the rank's KV heads are no multiple of it.
        warps: Warps per program. Warps beyond the slices of the heads take further tokens of the same heads.
        stages: Depth of Triton's pipeline; 2 copies the next tile while nothing is computed, 3 during the computation.
        programs: Programs per multiprocessor; best as many as fit at one time.
        registers: Most registers of a thread, 0 for no limit.
    """

    tokens: int
    heads: int
    warps: int
    stages: int
    programs: int
    registers: int = 0

    def heads_of(self, kv_heads: int) -> int:
        """KV heads of a program: the largest power of two up to ``heads`` that divides ``kv_heads``."""
        return min(self.heads, kv_heads & -kv_heads)


# By padded head size and bytes per KV element; found by the sweep of benchmarks/decode_sweep.py. There is no
# triton.autotune: it would run inside graph capture and at start-up.
_CONFIGS = {
    (64, 2): DecodeConfig(tokens=16, heads=4, warps=4, stages=2, programs=3, registers=168),
    (128, 2): DecodeConfig(tokens=16, heads=2, warps=2, stages=2, programs=4),
    (128, 1): DecodeConfig(tokens=32, heads=2, warps=2, stages=2, programs=4),
}
_FALLBACK = DecodeConfig(tokens=16, heads=2, warps=2, stages=2, programs=4)

_SLICE = 128
"""Most elements of a head that a warp holds: queries, K and output of more than that do not fit its registers."""

_MIN_SHARE = 64
"""Tokens below which a stretch is not worth a program of its own."""

_CPU_MULTIPROCESSORS = 4
"""Stands in for a GPU's count under Triton's interpreter."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Buffers between the two kernels, allocated once and shared by all layers of one shape.

    Attributes:
        accumulators: ``[pieces, query heads, head_padded]``, float32, not normalised.
        maxima: ``[pieces, query heads]``, float32: largest score, in powers of two.
        sums: Same shape: sum of the weights.
        pieces_of_row: ``[max_rows, 2]``, int32: first piece and number of pieces of a row.
        max_rows: Most rows of a call.
        max_seq_len: Longest row.
        kv_heads: KV heads.
        group: Query heads per KV head.
        head_size: Elements per head.
        heads: KV heads per program.
        slices: Slices that a head's elements lie in.
        parts: Runs of tokens in a tile, each a stream per slice of a head.
        target: Stretches that a large batch is cut into.
        multiprocessors: Multiprocessors of the device.
        config: Launch shape.
    """

    accumulators: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    pieces_of_row: torch.Tensor
    max_rows: int
    max_seq_len: int
    kv_heads: int
    group: int
    head_size: int
    heads: int
    slices: int
    parts: int
    target: int
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
        heads, slices = config.heads_of(kv_heads), triton.cdiv(padded, _SLICE)
        target = max(1, count * config.programs * heads // kv_heads)
        # A piece is a part of one row in one stretch: each after the first begins a stretch or a row.
        pieces = min(target, max_rows * triton.cdiv(max_seq_len, _MIN_SHARE)) + max_rows
        floats = {"dtype": torch.float32, "device": device}
        return cls(
            accumulators=torch.empty((pieces, kv_heads * group, padded), **floats),
            maxima=torch.empty((pieces, kv_heads * group), **floats),
            sums=torch.empty((pieces, kv_heads * group), **floats),
            pieces_of_row=torch.empty((max_rows, 2), dtype=torch.int32, device=device),
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            kv_heads=kv_heads,
            group=group,
            head_size=head_size,
            heads=heads,
            slices=slices,
            parts=max(1, config.warps // (heads * slices)),
            target=target,
            multiprocessors=count,
            config=config,
        )

    def stretches_of(self, rows: int) -> int:
        """Stretches that ``rows`` rows are cut into, whatever their lengths: the grid of a launch."""
        return min(self.target, rows * triton.cdiv(self.max_seq_len, _MIN_SHARE))


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
    config, slices = workspace.config, workspace.slices
    split = HeadSplit.of(head_size, cos_sin_cache, smallest=16, slices=slices)
    heads, parts, group = workspace.heads, workspace.parts, workspace.group
    head_padded = workspace.accumulators.shape[2]
    score_scale = scale * k_scale * LOG2E
    if softcap > 0.0:
        score_scale *= 2.0 / softcap
    decode_pieces_kernel[(kv_heads // heads, workspace.stretches_of(rows))](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cos_sin_cache,
        workspace.accumulators,
        workspace.maxima,
        workspace.sums,
        workspace.pieces_of_row,
        score_scale,
        softcap * LOG2E,
        rows,
        0 if cos_sin_cache is None else cos_sin_cache.shape[0] - 1,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        BLOCK_SIZE=block_size,
        MAX_ROWS=triton.next_power_of_2(workspace.max_rows),
        HEADS=heads,
        PARTS=parts,
        SLICES=slices,
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
        MIN_SHARE=triton.cdiv(_MIN_SHARE, config.tokens * parts),
        TOKENS=config.tokens,
        Q_ROWS=max(16, triton.next_power_of_2(group)),
        WIDE=_INTERPRETED,
        PRECISION="ieee",
        STAGES=config.stages,
        num_warps=config.warps,
        maxnreg=config.registers or None,
    )
    # With few rows a program per head keeps enough of the device busy; with many, fewer and larger programs cost less.
    merge_heads = 1 if rows * q_heads <= 8 * workspace.multiprocessors else 4
    merge_pieces_kernel[(rows, triton.cdiv(q_heads, merge_heads))](
        output,
        seq_lens,
        workspace.accumulators,
        workspace.maxima,
        workspace.sums,
        workspace.pieces_of_row,
        sinks,
        v_scale,
        *output.stride()[:2],
        Q_HEADS=q_heads,
        HEAD_SIZE=head_size,
        HEAD_PADDED=head_padded,
        HAS_SINKS=sinks is not None,
        HEADS=merge_heads,
        PIECES=32 if merge_heads == 1 else 8,
        num_warps=4,
    )
