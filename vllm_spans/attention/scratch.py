"""Scratch pages: which rotated pages a step needs, and in how many passes they fit.

A rotated page depends on its block and on its place in the sequence only. Rows that show one block at one place
(all gap rows of a request, requests with a common prefix) share its rotated page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_spans.attention.rotated_pages import PagesOfStep


@dataclass(frozen=True)
class ScratchPass:
    """A run of rows whose pages are gathered together.

    Attributes:
        first_row: First row of the pass.
        last_row: One past its last row.
        source_blocks: ``[n]`` blocks to gather.
        positions: ``[n * block_size]`` absolute position of every gathered token.
        slots: ``[n * block_size]`` slot of the rotated cache that each gathered token goes to.
        block_table: ``[rows, max pages of a row]`` page of the rotated cache of each row's pages.
        num_pages: Pages that the rotated cache must have.
    """

    first_row: int
    last_row: int
    source_blocks: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    num_pages: int


def pass_of_kept_pages(step: PagesOfStep, block_size: int, max_position: int) -> ScratchPass:
    """The one pass of a step over kept pages."""
    return ScratchPass(
        first_row=0,
        last_row=step.block_table.shape[0],
        source_blocks=step.source_blocks,
        positions=_tokens(step.places, block_size).clamp_(max=max_position),
        slots=_tokens(step.pages, block_size),
        block_table=step.block_table,
        num_pages=step.num_pages,
    )


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
    return ScratchPass(
        first_row=first,
        last_row=last,
        source_blocks=distinct // width,
        positions=_tokens(distinct % width, block_size).clamp_(max=max_position),
        slots=torch.arange(distinct.shape[0] * block_size),
        block_table=table,
        num_pages=distinct.shape[0],
    )


def _tokens(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Numbers of all tokens of some blocks."""
    return (blocks[:, None] * block_size + torch.arange(block_size, dtype=torch.int64)).flatten()
