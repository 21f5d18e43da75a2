"""GatherPlan: how the prefill rows of a GPU step share the scratch cache.

Rows of one group show one sequence over one block table, each up to an end of its own. The group's pages are rotated
once, to consecutive scratch pages, and every row of the group reads a prefix of them. Pure host code over numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GatherPass:
    """Rows whose scratch pages exist at the same time.

    Attributes:
        first_row: First row, as an index into the prefill rows.
        last_row: One past the last row.
        group_rows: ``[groups]`` row that has the group's whole block table.
        group_blocks: ``[groups]`` blocks to rotate.
        group_offsets: ``[groups]`` first scratch block; a multiple of ``blocks_per_page``.
        row_pages: ``[rows]`` first scratch page of each row.
    """

    first_row: int
    last_row: int
    group_rows: np.ndarray
    group_blocks: np.ndarray
    group_offsets: np.ndarray
    row_pages: np.ndarray


def plan_gather(
    groups: Sequence[str],
    seq_lens: np.ndarray,
    block_size: int,
    blocks_per_page: int,
    capacity: int,
) -> list[GatherPass]:
    """Place the groups of a step in the scratch cache.

    Args:
        groups: Group of each prefill row.
        seq_lens: ``[rows]`` tokens of each row's sequence up to its end.
        block_size: Tokens per block.
        blocks_per_page: Blocks per scratch page: the stock kernel may read larger pages than the cache has.
        capacity: Pages of the scratch cache.

    Returns:
        Passes that cover all rows in order: one, unless the groups' pages exceed the capacity.

    Raises:
        ValueError: One row alone exceeds the capacity.
    """
    blocks = -(-np.asarray(seq_lens, dtype=np.int64) // block_size)
    passes: list[GatherPass] = []
    first = 0
    while first < len(groups):
        leaders: dict[str, int] = {}
        pages_used, last = 0, first
        while last < len(groups):
            leader = leaders.get(groups[last])
            before = _pages(blocks[leader], blocks_per_page) if leader is not None else 0
            more = max(0, _pages(blocks[last], blocks_per_page) - before)
            if pages_used + more > capacity:
                break
            pages_used += more
            if leader is None or blocks[last] > blocks[leader]:
                leaders[groups[last]] = last
            last += 1
        if last == first:
            raise ValueError(
                f"a sequence of {int(seq_lens[first])} tokens does not fit {capacity} scratch pages"
            )
        passes.append(_make_pass(groups, blocks, first, last, leaders, blocks_per_page))
        first = last
    return passes


def _pages(blocks: int, blocks_per_page: int) -> int:
    return -(-int(blocks) // blocks_per_page)


def _make_pass(
    groups: Sequence[str],
    blocks: np.ndarray,
    first: int,
    last: int,
    leaders: dict[str, int],
    blocks_per_page: int,
) -> GatherPass:
    first_page: dict[str, int] = {}
    page = 0
    for group, leader in leaders.items():
        first_page[group] = page
        page += _pages(blocks[leader], blocks_per_page)
    rows = np.fromiter(leaders.values(), dtype=np.int32, count=len(leaders))
    offsets = np.fromiter(first_page.values(), dtype=np.int32, count=len(leaders))
    return GatherPass(
        first_row=first,
        last_row=last,
        group_rows=rows,
        group_blocks=blocks[rows].astype(np.int32),
        group_offsets=offsets * np.int32(blocks_per_page),
        row_pages=np.array([first_page[groups[row]] for row in range(first, last)], dtype=np.int32),
    )
