"""Scratch pages: which rotated pages a step needs, and in how many passes they fit.

A rotated page depends on its block and on its place in the sequence only. Rows that show one block at one place
(all gap rows of a request, requests with a common prefix) share its rotated page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScratchPass:
    """A run of rows whose pages are gathered together.

    Attributes:
        first_row: First row of the pass.
        last_row: One past its last row.
        source_blocks: ``[pages]`` blocks to gather.
        positions: ``[pages * block_size]`` absolute position of every gathered token.
        block_table: ``[rows, max pages of a row]`` scratch page of each row's pages.
    """

    first_row: int
    last_row: int
    source_blocks: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor


def plan_scratch(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_pages: int,
    max_position: int,
) -> list[ScratchPass]:
    """Group the rows of a step into passes.

    Args:
        block_table: ``[rows, columns]`` blocks of each row.
        seq_lens: ``[rows]`` tokens of each row, those of this step included.
        block_size: Tokens per block.
        max_pages: Most scratch pages of a pass; one row may exceed it alone.
        max_position: Largest position that the rotation knows; tokens behind a row's end are clamped to it.

    Returns:
        Passes that cover all rows in order.
    """
    num_rows = seq_lens.shape[0]
    pages = (seq_lens.to(torch.int64) + block_size - 1) // block_size
    passes: list[ScratchPass] = []
    first = 0
    while first < num_rows:
        last = _last_row(block_table, pages, first, max_pages)
        passes.append(_make_pass(block_table, pages, first, last, block_size, max_position))
        first = last
    return passes


def _pairs(
    block_table: torch.Tensor, pages: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block and place of each page of some rows, as one number, and which entries of the table they are."""
    width = max(int(pages[first:last].max()), 1)
    table = block_table[first:last, :width].to(torch.int64)
    places = torch.arange(width, dtype=torch.int64)
    used = places[None, :] < pages[first:last, None]
    return (table * width + places)[used], used, places


def _last_row(block_table: torch.Tensor, pages: torch.Tensor, first: int, max_pages: int) -> int:
    """Largest run of rows from ``first`` whose distinct pages fit."""
    num_rows = pages.shape[0]
    if int(pages[first:].sum()) <= max_pages:
        return num_rows
    low, high = first + 1, num_rows
    while low < high:
        middle = (low + high + 1) // 2
        distinct = torch.unique(_pairs(block_table, pages, first, middle)[0]).shape[0]
        if distinct <= max_pages:
            low = middle
        else:
            high = middle - 1
    return low


def _make_pass(
    block_table: torch.Tensor,
    pages: torch.Tensor,
    first: int,
    last: int,
    block_size: int,
    max_position: int,
) -> ScratchPass:
    pairs, used, places = _pairs(block_table, pages, first, last)
    width = places.shape[0]
    distinct, inverse = torch.unique(pairs, return_inverse=True)
    table = torch.zeros(used.shape, dtype=torch.int32)
    table[used] = inverse.to(torch.int32)
    starts = (distinct % width) * block_size
    positions = (starts[:, None] + torch.arange(block_size, dtype=torch.int64)).flatten()
    return ScratchPass(
        first_row=first,
        last_row=last,
        source_blocks=distinct // width,
        positions=positions.clamp_(max=max_position),
        block_table=table,
    )
