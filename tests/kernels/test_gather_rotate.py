"""Gather-rotate against float64: rotation, layouts, dtypes, empty and ragged groups, pages that are nobody's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.kernels import reference
from vllm_spans.attention.kernels.gather_rotate import GatherConfig, gather_rotate

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One shape and what is asked of it."""

    head_size: int = 64
    heads: int = 2
    block_size: int = 16
    rotary_dim: int | None = None
    is_neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    table_dtype: torch.dtype = torch.float32
    table_rows: int = 4096
    layout: str = "NHD"
    pages: tuple[int, ...] = (3, 0, 5, 1)
    k_scale: float = 1.0
    v_scale: float = 1.0
    config: GatherConfig | None = None


def check(case: Case, device: str, seed: int = 0) -> None:
    """Run the kernel on random input and compare every element of the output."""
    generator = torch.Generator().manual_seed(seed)
    columns, out_dtype = max(*case.pages, 1) + 2, case.out_dtype or case.dtype
    blocks = columns * (len(case.pages) + 2)
    key, value = reference.paged_kv(
        blocks,
        case.block_size,
        case.heads,
        case.head_size,
        case.dtype,
        case.layout,
        device,
        generator,
    )
    rotary_dim = case.head_size if case.rotary_dim is None else case.rotary_dim
    table = reference.cos_sin_table(case.table_rows, rotary_dim, case.table_dtype, device)
    rows = len(case.pages) + 2
    # A wider table than is used: its stride is not its width.
    block_table = torch.randperm(rows * columns, generator=generator).to(torch.int32)
    block_table = (block_table % blocks).view(rows, columns).to(device)[:, : columns - 1]
    group_rows = torch.randperm(rows, generator=generator)[: len(case.pages)].to(torch.int32)
    # Groups in another order than their places, with a page of nobody's before each.
    order = torch.randperm(len(case.pages), generator=generator).tolist()
    offsets, end = [0] * len(case.pages), 0
    for group in order:
        offsets[group] = end + 1
        end += 1 + case.pages[group]
    shape = (end + 1, case.block_size, case.heads, 2, case.head_size)
    out = torch.full(shape, float("nan"), dtype=out_dtype, device=device)
    key_out, value_out = out[..., 0, :], out[..., 1, :]
    gather_rotate(
        key,
        value,
        block_table,
        group_rows.to(device),
        torch.tensor(case.pages, dtype=torch.int32, device=device),
        torch.tensor(offsets, dtype=torch.int32, device=device),
        max(case.pages) + 1,
        key_out,
        value_out,
        table,
        case.is_neox,
        case.k_scale,
        case.v_scale,
        config=case.config,
    )
    owned = torch.zeros(end + 1, dtype=torch.bool)
    for group, pages in enumerate(case.pages):
        place = slice(offsets[group], offsets[group] + pages)
        owned[place] = True
        if not pages:
            continue
        tokens, row = pages * case.block_size, int(group_rows[group])
        want_key = reference.rotate(
            reference.gather(key, block_table, row, tokens, case.k_scale),
            torch.arange(tokens, device=device),
            table,
            case.is_neox,
        )
        want_value = reference.gather(value, block_table, row, tokens, case.v_scale)
        got_key, got_value = key_out[place].flatten(0, 1), value_out[place].flatten(0, 1)
        assert reference.relative_error(got_key, want_key) < TOLERANCE[out_dtype]
        # What is not rotated is copied, or rounded once from the dequantised value.
        assert torch.equal(got_key[..., rotary_dim:], want_key[..., rotary_dim:].to(out_dtype))
        assert torch.equal(got_value, want_value.to(out_dtype))
    assert out[~owned].isnan().all()


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_head_sizes(head_size: int, is_neox: bool, device: str) -> None:
    """Head sizes that are no power of two are masked, not padded."""
    check(Case(head_size=head_size, is_neox=is_neox, pages=(2, 0, 1)), device)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [0, 16, 24, 40, 64])
def test_partial_rotary(rotary_dim: int, is_neox: bool, device: str) -> None:
    """Elements past the rotary dim are copied; without RoPE all are."""
    check(Case(rotary_dim=rotary_dim, is_neox=is_neox, dtype=torch.float32), device)


@pytest.mark.parametrize("layout", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype, device: str) -> None:
    """Any physical order of the cache, any dtype of the model."""
    check(Case(layout=layout, dtype=dtype, heads=3, table_dtype=dtype), device)


@pytest.mark.parametrize("dtype", reference.FP8, ids=str)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_fp8_is_dequantised(dtype: torch.dtype, rotary_dim: int, device: str) -> None:
    """Scores and values leave with their scales applied."""
    case = Case(
        dtype=dtype, out_dtype=torch.bfloat16, k_scale=0.5, v_scale=2.0, rotary_dim=rotary_dim
    )
    check(case, device)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 128])
def test_block_sizes(block_size: int, device: str) -> None:
    """Pages smaller than, as large as and larger than what a program takes, and no power of two."""
    check(Case(block_size=block_size, pages=(1, 4, 0, 2)), device)


@pytest.mark.parametrize(
    "config",
    [GatherConfig(16, 1, 4), GatherConfig(64, 8, 4), GatherConfig(8, 2, 1)],
    ids=str,
)
def test_launch_shapes(config: GatherConfig, device: str) -> None:
    """The sweep may pick any of them."""
    check(Case(heads=5, config=config), device)


def test_positions_past_the_table_are_clamped(device: str) -> None:
    """The last page of the longest request reaches beyond the table's end."""
    check(Case(table_rows=40, pages=(3, 2)), device)


@pytest.mark.parametrize("pages", [(0,), (0, 0, 0), (1,), (9, 1, 0, 0, 2)], ids=str)
def test_ragged_groups(pages: tuple[int, ...], device: str) -> None:
    """Groups with nothing to copy write nothing."""
    check(Case(pages=pages), device, seed=len(pages))


def test_refuses_what_it_would_misread(device: str) -> None:
    """A shape or dtype that does not fit is an error, not wrong numbers."""
    cache = torch.zeros(4, 16, 2, 64, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    out = torch.zeros_like(cache)

    def call(key=cache, value=cache, key_out=out, cos_sin=None) -> None:
        gather_rotate(key, value, table, one, one, one, 1, key_out, out, cos_sin, True)

    with pytest.raises(ValueError, match="agree"):
        call(value=cache[:, :8])
    with pytest.raises(ValueError, match="adjacent"):
        call(key=cache.transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(ValueError, match="do not fit"):
        call(key_out=out[:, :8])
    with pytest.raises(ValueError, match="agree"):
        call(key_out=out.half())
    with pytest.raises(ValueError, match="wide"):
        call(cos_sin=torch.zeros(8, 66, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_long_requests(layout: str, device: str) -> None:
    """Sizes that the engine runs."""
    check(Case(head_size=128, heads=8, layout=layout, pages=(2048, 512, 0, 777)), device)
