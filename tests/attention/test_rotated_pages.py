"""Prevents a stale rotated page: a kept page must hold what its block holds now, rotated for its place."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spans.attention.rotated_pages import RotatedPages

BLOCK = 4
PLACES = 8


class Model:
    """Blocks with a version each; a rotated page remembers what it was made from."""

    def __init__(self, capacity: int, num_blocks: int) -> None:
        self.kept = RotatedPages(capacity, BLOCK, PLACES)
        self.capacity = capacity
        self.version = [0] * num_blocks
        self.pages: dict[int, tuple[int, int, int]] = {}
        self.rotations = 0

    def step(self, tables: list[list[int]], lens: list[int], slots: list[int]) -> bool:
        for block in {slot // BLOCK for slot in slots if slot >= 0}:
            self.version[block] += 1
        width = max(map(len, tables))
        table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
        step = self.kept.step(table, torch.tensor(lens), torch.tensor(slots, dtype=torch.int64))
        if step is None:
            return False
        assert step.num_pages <= self.capacity
        self.rotations = len(step.pages)
        for block, place, page in zip(
            step.source_blocks.tolist(), step.places.tolist(), step.pages.tolist(), strict=True
        ):
            assert 0 <= page < step.num_pages
            self.pages[page] = (block, place, self.version[block])
        for row, (blocks, length) in enumerate(zip(tables, lens, strict=True)):
            for place in range(-(-length // BLOCK)):
                page = int(step.block_table[row, place])
                assert self.pages[page] == (blocks[place], place, self.version[blocks[place]])
        return True


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_every_page_read_is_current(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    model = Model(capacity, num_blocks=10)
    for _ in range(25):
        tables, lens, slots = [], [], []
        for _ in range(rng.randint(1, 4)):
            table = [rng.randrange(10) for _ in range(rng.randint(1, PLACES))]
            length = rng.randint(1, len(table) * BLOCK)
            tables.append(table)
            lens.append(length)
            for position in range(max(0, length - rng.randint(0, 5)), length):
                slots.append(table[position // BLOCK] * BLOCK + position % BLOCK)
        if rng.random() < 0.3:
            slots.append(-1)
        if rng.random() < 0.1:
            model.kept.clear()
        distinct = {
            (block, place)
            for t, n in zip(tables, lens, strict=True)
            for place, block in enumerate(t[: -(-n // BLOCK)])
        }
        assert model.step(tables, lens, slots) == (len(distinct) <= capacity)


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_rotates_one_page_per_row(rows: int) -> None:
    model = Model(capacity=64, num_blocks=32)
    tables = [[8 * row + place for place in range(6)] for row in range(rows)]
    model.step(
        tables, [20] * rows, [t[p // BLOCK] * BLOCK + p % BLOCK for t in tables for p in range(20)]
    )
    assert model.rotations == 5 * rows
    for length in (21, 22, 23, 24):
        model.step(tables, [length] * rows, [t[5] * BLOCK + (length - 1) % BLOCK for t in tables])
        assert model.rotations == rows


def test_a_worker_keeps_as_many_pages_as_its_cache_has_blocks() -> None:
    """The worker's own copy of the configuration is never told the number of blocks."""
    from types import SimpleNamespace

    import vllm.config  # noqa: F401  (must come before the backend)

    from vllm_spans.attention.cpu_backend import SpansCPUMetadataBuilder

    builder = object.__new__(SpansCPUMetadataBuilder)
    builder.layer_names, builder.block_size = ["layer"], 32
    builder.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=None),
        model_config=SimpleNamespace(max_model_len=4096),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(kv_cache=torch.zeros(70, 1, 1, 1))}
        ),
    )
    pages = builder._pages()
    table = torch.arange(64)[None]
    assert pages.step(table, torch.tensor([64 * 32]), torch.tensor([-1])) is not None
