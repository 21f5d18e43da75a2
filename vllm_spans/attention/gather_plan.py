"""GatherPlan: how the prefill rows of a GPU step share the scratch cache.

Rows of one group show one sequence over one block table, each up to an end of its own. The group's pages are rotated
once per pass, to consecutive scratch pages, and every row of the group reads a prefix of them. Pure host code over
numpy.
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
        group_rows: ``[groups]`` row that has the group's whole block table: the group's longest, in this pass or not.
        group_blocks: ``[groups]`` blocks to rotate: what the group's longest row in this pass reads.
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
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    blocks = -(-seq_lens // block_size)
    leaders = _leaders(groups, seq_lens)
    passes: list[GatherPass] = []
    first = 0
    while first < len(groups):
        blocks_of: dict[str, int] = {}
        pages_used, last = 0, first
        while last < len(groups):
            have = blocks_of.get(groups[last], 0)
            need = max(have, int(blocks[last]))
            more = _pages(need, blocks_per_page) - _pages(have, blocks_per_page)
            if pages_used + more > capacity:
                break
            pages_used += more
            blocks_of[groups[last]] = need
            last += 1
        if last == first:
            raise ValueError(
                f"a sequence of {int(seq_lens[first])} tokens does not fit {capacity} scratch pages"
            )
        passes.append(_make_pass(groups, first, last, leaders, blocks_of, blocks_per_page))
        first = last
    return passes


def longest_first(groups: Sequence[str], seq_lens: np.ndarray) -> list[int]:
    """The order of prefill rows in which the stock kernel is done soonest.

    The kernel hands its tiles to multiprocessors in the order of the batch, each time that one becomes free. A long
    row at the end keeps a few of them busy after all others are done; short ones fill what the long ones leave. The
    rows of a group stay together, or several passes would gather it several times.

    Args:
        groups: Group of each prefill row.
        seq_lens: ``[rows]`` tokens of each row's sequence up to its end.

    Returns:
        Rows in the new order: groups by their longest row, and each group's rows by length, longest first.
    """
    longest: dict[str, int] = {}
    for group, length in zip(groups, seq_lens, strict=True):
        longest[group] = max(longest.get(group, 0), int(length))
    return sorted(
        range(len(groups)), key=lambda row: (-longest[groups[row]], groups[row], -seq_lens[row])
    )


def _leaders(groups: Sequence[str], seq_lens: np.ndarray) -> dict[str, int]:
    """The longest row of each group in the whole step: the one that is sure to have the group's whole block table."""
    leaders: dict[str, int] = {}
    for row, group in enumerate(groups):
        if group not in leaders or seq_lens[row] > seq_lens[leaders[group]]:
            leaders[group] = row
    return leaders


def _pages(blocks: int, blocks_per_page: int) -> int:
    return -(-blocks // blocks_per_page)


def _make_pass(
    groups: Sequence[str],
    first: int,
    last: int,
    leaders: dict[str, int],
    blocks_of: dict[str, int],
    blocks_per_page: int,
) -> GatherPass:
    first_page: dict[str, int] = {}
    page = 0
    for group, blocks in blocks_of.items():
        first_page[group] = page
        page += _pages(blocks, blocks_per_page)
    count = len(blocks_of)
    offsets = np.fromiter(first_page.values(), dtype=np.int32, count=count)
    return GatherPass(
        first_row=first,
        last_row=last,
        group_rows=np.fromiter((leaders[group] for group in blocks_of), np.int32, count),
        group_blocks=np.fromiter(blocks_of.values(), np.int32, count),
        group_offsets=offsets * np.int32(blocks_per_page),
        row_pages=np.array([first_page[groups[row]] for row in range(first, last)], dtype=np.int32),
    )
