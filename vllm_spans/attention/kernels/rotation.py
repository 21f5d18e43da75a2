"""Rotating K tiles inside Triton kernels: neox and gptj pairs, partial rotary, fp8 K."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8_DTYPES)


@dataclass(frozen=True)
class HeadSplit:
    """How the elements of one head fall into rotary pairs and a rest that is not rotated.

    Attributes:
        pairs: Rotary pairs, half of ``rotary_dim``.
        pairs_padded: Pairs in a slice, as the power of two that a tile needs; 0 without RoPE.
        rest: Elements past ``rotary_dim``.
        rest_padded: Their number in a slice, as the power of two that a tile needs; 0 when all elements are rotated.
    """

    pairs: int
    pairs_padded: int
    rest: int
    rest_padded: int

    @classmethod
    def of(
        cls,
        head_size: int,
        cos_sin_cache: torch.Tensor | None,
        smallest: int = 1,
        slices: int = 1,
    ) -> HeadSplit:
        """Split a head by the width of its cos/sin table.

        Args:
            head_size: Elements per head.
            cos_sin_cache: ``[max_position, rotary_dim]``, cos then sin; ``None`` for no RoPE.
            smallest: Smallest tile width (``tl.dot`` wants 16).
            slices: Tiles that share the pairs, and the rest, in equal parts; padding is in the last ones.

        Returns:
            The split.

        Raises:
            ValueError: The table does not fit the head.
        """
        rotary_dim = 0 if cos_sin_cache is None else cos_sin_cache.shape[1]
        if rotary_dim % 2 or rotary_dim > head_size:
            raise ValueError(
                f"cos_sin_cache is {rotary_dim} wide: it has to be even and at most the head size, {head_size}"
            )

        def padded(count: int) -> int:
            width: int = triton.next_power_of_2(triton.cdiv(count, slices))
            return max(smallest, width) if count else 0

        pairs, rest = rotary_dim // 2, head_size - rotary_dim
        return cls(pairs, padded(pairs), rest, padded(rest))


def check_paged(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Refuse paged K/V views that the kernels would misread.

    Args:
        key_cache: ``[blocks, block_size, kv_heads, head_size]``.
        value_cache: The same shape and dtype.

    Raises:
        ValueError: Shapes or dtypes differ or are not handled, or elements of a head are not adjacent.
    """
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"K {tuple(key_cache.shape)} {key_cache.dtype} and V {tuple(value_cache.shape)} "
            f"{value_cache.dtype} have to agree"
        )
    if key_cache.dtype not in KV_DTYPES:
        raise ValueError(f"KV of {key_cache.dtype} is not handled")
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("the elements of a head have to be adjacent in memory")


@triton.jit
def rotate_pairs(first, second, cos, sin, dtype: tl.constexpr = tl.float32):
    """Rotate pairs in ``dtype``; the operands broadcast."""
    a = first.to(dtype)
    b = second.to(dtype)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def load_elements(
    rows, valid, COUNT: tl.constexpr, PADDED: tl.constexpr, part=0, SLICES: tl.constexpr = 1
):
    """Load ``COUNT`` neighbours in tiles of ``PADDED``, of which there are ``SLICES``.

    ``rows`` are pointers ``[..., 1]`` to the first, ``valid`` a mask of the same rank, ``part`` the number of the slice
    that each row reads, of that rank too.
    """
    element = tl.arange(0, PADDED)[None, :]
    if SLICES > 1:
        element = part * PADDED + element
    mask = valid if COUNT == PADDED * SLICES else valid & (element < COUNT)
    return tl.load(rows + element, mask=mask, other=0.0)


@triton.jit
def load_pairs(
    rows,
    valid,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    part=0,
    SLICES: tl.constexpr = 1,
):
    """Load the rotary elements of heads, with the arguments of ``load_elements``; both of a pair are in one slice.

    Both styles read whole 16-byte pieces. neox gives the two halves, ``[..., PAIRS_PADDED]`` each; gptj gives the
    interleaved pairs, ``[..., 2 * PAIRS_PADDED]``, and 0. ``split_pairs`` makes halves of both.
    """
    if IS_NEOX:
        first = load_elements(rows, valid, PAIRS, PAIRS_PADDED, part, SLICES)
        second = load_elements(rows + PAIRS, valid, PAIRS, PAIRS_PADDED, part, SLICES)
    else:
        first = load_elements(rows, valid, 2 * PAIRS, 2 * PAIRS_PADDED, part, SLICES)
        second = 0
    return first, second


@triton.jit
def split_pairs(
    first,
    second,
    PAIRS_PADDED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    dtype: tl.constexpr = tl.float32,
):
    """The halves of what ``load_pairs`` gave, in ``dtype``."""
    first = first.to(dtype)
    if IS_NEOX:
        second = second.to(dtype)
    else:
        if len(first.shape) == 2:
            pairs = tl.reshape(first, (first.shape[0], PAIRS_PADDED, 2))
        else:
            pairs = tl.reshape(first, (first.shape[0], first.shape[1], PAIRS_PADDED, 2))
        first, second = tl.split(pairs)
    return first, second


@triton.jit
def load_cos_sin(
    table,
    stride,
    position,
    valid,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    part=0,
    SLICES: tl.constexpr = 1,
):
    """Load cos and sin of ``position`` as they are stored, ``[..., PAIRS_PADDED]`` each."""
    rows = table + tl.expand_dims(position, -1).to(tl.int64) * stride
    valid = tl.expand_dims(valid, -1)
    cos = load_elements(rows, valid, PAIRS, PAIRS_PADDED, part, SLICES)
    sin = load_elements(rows + PAIRS, valid, PAIRS, PAIRS_PADDED, part, SLICES)
    return cos, sin
