"""Prevents prefill rows on the GPU from reading scratch pages of another group, or pages that nobody rotated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.attention.gather_plan import plan_gather

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
