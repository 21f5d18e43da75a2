"""Decode attention over paged, un-rotated K: the rotation of K is fused into a split-KV kernel.

Decode is bound by reading KV once, so a rotated copy would double its cost. Five things keep the rotation hidden:

* Several KV heads share a program and with it cos and sin, which read per head would be as many bytes as K.
* Each warp has a *stream* of its own, one KV head's share of a tile (``tiles.py``). K goes from shared memory to the
  tensor cores' registers in the one layout in which it is rotated. Nothing crosses warps in the loop but the scores of
  wide heads, of which a warp holds a slice.
* Tokens and elements are the rows of the multiplications and queries their columns, of which the tensor cores want 8
  and not 16: scores, weights and output take half the registers.
* Work is cut on the device. Each program derives from ``seq_lens`` which stretch of the batch's tiles is its own: all
  stretches are equally long, however ragged the batch, and there are as many as run at one time. The grid depends on
  host bounds only, so CUDA graphs may capture it.
* The scales of fp8 K and V are applied to scores and output, not to elements, which become fp16 without a detour.

A second kernel merges the pieces of a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from .decode_kernels import decode_pieces_kernel, merge_pieces_kernel
from .launch import DecodeConfig, Launch, choose_launch
from .rotation import FP8_DTYPES, HeadSplit, check_paged

LOG2E = 1.4426950408889634

_INTERPRETED = bool(triton.knobs.runtime.interpret)


_MIN_SHARE = 64
"""Tokens below which a stretch is not worth a program of its own."""

_CPU_MULTIPROCESSORS = 4
_CPU_SHARED = 227 * 1024
"""Stand in for a GPU's numbers under Triton's interpreter."""


@functools.cache
def row_classes(max_rows: int) -> tuple[int, ...]:
    """Classes of batch sizes, each by its largest: powers of four from 16.

    Every program looks at the lengths of all rows. A kernel for the largest batch would make small ones look at nothing
    for long, and a kernel for each size would be compiled in the middle of serving.
    """
    classes = [16]
    while classes[-1] < max_rows:
        classes.append(classes[-1] * 4)
    return tuple(classes)


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
        target: Stretches that a large batch is cut into.
        multiprocessors: Multiprocessors of the device.
        launch: How the kernel is launched.
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
    target: int
    multiprocessors: int
    launch: Launch

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
        query_dtype: torch.dtype | None = None,
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
            query_dtype: Dtype of the queries; by default ``kv_dtype``, bf16 if that is fp8.
            config: Launch shape instead of the table's, for the sweep.

        Returns:
            The workspace.

        Raises:
            ValueError: A size is not positive, or no launch fits the device's shared memory.
        """
        if min(max_rows, kv_heads, group, head_size, max_seq_len) < 1:
            raise ValueError("a decode workspace needs positive sizes")
        device = torch.device(device)
        count, shared = _CPU_MULTIPROCESSORS, _CPU_SHARED
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            count, shared = (
                properties.multi_processor_count,
                properties.shared_memory_per_block_optin,
            )
        padded = max(16, triton.next_power_of_2(head_size))
        operand_size = None if query_dtype is None else query_dtype.itemsize
        launch = choose_launch(
            kv_heads, group, padded, kv_dtype.itemsize, shared, operand_size, config
        )
        target = max(1, count * launch.config.programs * launch.heads // kv_heads)
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
            target=target,
            multiprocessors=count,
            launch=launch,
        )

    def stretches_of(self, rows: int) -> int:
        """Stretches that ``rows`` rows are cut into, whatever their lengths: the grid of a launch."""
        return min(self.target, rows * triton.cdiv(self.max_seq_len, _MIN_SHARE))


def pieces_constants(
    workspace: DecodeWorkspace,
    rows: int,
    split: HeadSplit,
    block_size: int,
    is_neox: bool,
    kv_dtype: torch.dtype,
    window_left: int,
    has_softcap: bool,
) -> dict[str, object]:
    """What ``decode_pieces_kernel`` is compiled for, the arguments of ``decode_attention`` given."""
    launch = workspace.launch
    return {
        "BLOCK_SIZE": block_size,
        "MAX_ROWS": next(most for most in row_classes(workspace.max_rows) if most >= rows),
        "HEADS": launch.heads,
        "PARTS": launch.parts,
        "SLICES": launch.slices,
        "GROUP": workspace.group,
        "HEAD_SIZE": workspace.head_size,
        "HEAD_PADDED": launch.head_padded,
        "PAIRS": split.pairs,
        "PAIRS_PADDED": split.pairs_padded,
        "REST": split.rest,
        "REST_PADDED": split.rest_padded,
        "IS_NEOX": is_neox,
        "IS_FP8": kv_dtype in FP8_DTYPES,
        "IS_E4M3": kv_dtype == torch.float8_e4m3fn,
        "WINDOW_LEFT": window_left,
        "HAS_SOFTCAP": has_softcap,
        "MIN_SHARE": triton.cdiv(_MIN_SHARE, launch.config.tokens * launch.parts),
        "TOKENS": launch.config.tokens,
        "Q_ROWS": launch.q_rows,
        "WIDE": _INTERPRETED,
        "PRECISION": "ieee",
        "STAGES": launch.config.stages,
    }


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
    if key_cache.dtype not in FP8_DTYPES and key_cache.dtype != query.dtype:
        raise ValueError(f"a query of {query.dtype} does not fit KV of {key_cache.dtype}")
    if cos_sin_cache is not None and cos_sin_cache.stride(1) != 1:
        raise ValueError("the rows of cos_sin_cache have to be contiguous")
    if block_table.stride(1) != 1 or seq_lens.stride(0) != 1:
        raise ValueError("seq_lens and the rows of block_table have to be contiguous")
    if rows == 0:
        return
    launch = workspace.launch
    split = HeadSplit.of(head_size, cos_sin_cache, smallest=16, slices=launch.slices)
    config, head_padded = launch.config, launch.head_padded
    score_scale = scale * k_scale * LOG2E
    if softcap > 0.0:
        score_scale *= 2.0 / softcap
    decode_pieces_kernel[(kv_heads // launch.heads, workspace.stretches_of(rows))](
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
        **pieces_constants(
            workspace,
            rows,
            split,
            block_size,
            is_neox,
            key_cache.dtype,
            max(window_left, -1),
            softcap > 0.0,
        ),
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
