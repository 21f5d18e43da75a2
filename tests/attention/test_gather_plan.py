"""Prevents prefill rows on the GPU from reading scratch pages of another group, or pages that nobody rotated."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.attention.gather_plan import longest_first, plan_gather

BLOCK = 16


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 400)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 8]),
    st.integers(26, 120),
)
def test_every_row_reads_its_groups_pages(
    rows: list[tuple[str, int]], blocks_per_page: int, capacity: int
) -> None:
    groups = [group for group, _ in rows]
    lens = np.array([length for _, length in rows])
    passes = plan_gather(groups, lens, BLOCK, blocks_per_page, capacity)
    assert [p.first_row for p in passes] == [0, *(p.last_row for p in passes[:-1])]
    assert passes[-1].last_row == len(rows)
    for gather in passes:
        owner: dict[int, str] = {}
        for row, count, offset in zip(
            gather.group_rows, gather.group_blocks, gather.group_offsets, strict=True
        ):
            group = [r for r in range(len(rows)) if groups[r] == groups[row]]
            assert lens[row] == max(lens[r] for r in group), "only the longest has the whole table"
            here = [r for r in group if gather.first_row <= r < gather.last_row]
            assert count == max(-(-int(lens[r]) // BLOCK) for r in here)
            assert offset % blocks_per_page == 0
            for block in range(offset, offset + count):
                assert block not in owner
                owner[block] = groups[row]
        assert max(owner) < capacity * blocks_per_page
        for row in range(gather.first_row, gather.last_row):
            start = gather.row_pages[row - gather.first_row] * blocks_per_page
            for block in range(start, start + -(-int(lens[row]) // BLOCK)):
                assert owner[block] == groups[row]


def test_the_rows_of_a_request_share_one_gather() -> None:
    (gather,) = plan_gather(["@r"] * 33, np.arange(1, 34) * 1024, BLOCK, 1, 4096)
    assert gather.group_rows.tolist() == [32] and gather.group_blocks.tolist() == [33 * 64]


def test_a_sequence_larger_than_the_scratch_is_an_error() -> None:
    with pytest.raises(ValueError, match="1000 tokens does not fit 10 scratch pages"):
        plan_gather(["@r"], np.array([1000]), BLOCK, 1, 10)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 400)), max_size=12))
def test_long_rows_come_first_and_groups_stay_whole(rows: list[tuple[str, int]]) -> None:
    order = longest_first([group for group, _ in rows], np.array([length for _, length in rows]))
    assert sorted(order) == list(range(len(rows)))
    ordered = [rows[row] for row in order]
    groups = [
        (group, [length for _, length in found])
        for group, found in itertools.groupby(ordered, key=lambda row: row[0])
    ]
    assert len({group for group, _ in groups}) == len(groups)
    assert all(lengths == sorted(lengths, reverse=True) for _, lengths in groups)
    firsts = [lengths[0] for _, lengths in groups]
    assert firsts == sorted(firsts, reverse=True)


def busy(tiles: list[int], processors: int) -> int:
    """When the last processor is done, if each takes the next tile when it becomes free."""
    free = [0] * processors
    for tile in tiles:
        heapq.heappush(free, heapq.heappop(free) + tile)
    return max(free)


def test_a_warm_request_keeps_all_processors_busy_to_the_end() -> None:
    """32 gaps of a request and its question, 8 tiles each, on the 132 multiprocessors of an H200."""
    lengths = np.array([1024 * gap + 32 for gap in range(32)] + [32 * 1024 + 64])
    order = longest_first(["@r"] * 33, lengths)
    least = 8 * int(lengths.sum()) / 132
    assert busy([int(lengths[row]) for row in order for _ in range(8)], 132) < 1.1 * least
    assert busy([int(length) for length in lengths for _ in range(8)], 132) > 1.4 * least
