"""Prevents a row from reading another row's page, or a page rotated for another place."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spans.attention.scratch import plan_scratch

BLOCK = 4


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over few blocks, so that some share blocks at equal and at different places."""
    rows = draw(st.integers(1, 6))
    width = draw(st.integers(1, 5))
    table = draw(
        st.lists(
            st.lists(st.integers(0, 7), min_size=width, max_size=width),
            min_size=rows,
            max_size=rows,
        )
    )
    lens = draw(st.lists(st.integers(1, width * BLOCK), min_size=rows, max_size=rows))
    return torch.tensor(table, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)


@settings(max_examples=200)
@given(steps(), st.integers(1, 12))
def test_each_row_sees_its_own_blocks_at_their_places(
    step: tuple[torch.Tensor, torch.Tensor], max_pages: int
) -> None:
    table, lens = step
    passes = plan_scratch(table, lens, BLOCK, max_pages, max_position=10**6)
    assert [p.first_row for p in passes] == [0, *(p.last_row for p in passes[:-1])]
    assert passes[-1].last_row == len(lens)
    for scratch in passes:
        pairs = set()
        for row in range(scratch.first_row, scratch.last_row):
            for place in range(-(-int(lens[row]) // BLOCK)):
                page = int(scratch.block_table[row - scratch.first_row, place])
                assert int(scratch.source_blocks[page]) == int(table[row, place])
                positions = scratch.positions[page * BLOCK : (page + 1) * BLOCK].tolist()
                assert positions == list(range(place * BLOCK, (place + 1) * BLOCK))
                pairs.add((int(table[row, place]), place))
        assert len(scratch.source_blocks) == len(pairs), "a page is gathered once"
        assert len(pairs) <= max_pages or scratch.last_row == scratch.first_row + 1


def test_positions_behind_the_longest_sequence_are_clamped() -> None:
    (scratch,) = plan_scratch(torch.tensor([[3, 5]]), torch.tensor([6]), BLOCK, 8, max_position=5)
    assert scratch.positions.tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
