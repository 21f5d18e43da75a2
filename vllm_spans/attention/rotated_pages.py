"""RotatedPages: which rotated pages are kept from step to step.

Decoding reads its whole context in every step; rotating it anew each time would cost more than the attention. A
rotated page stays right until its block is written again; every write of a step is in its slot mapping, and writes
from elsewhere are told with ``drop_blocks``. So a decode row rotates one page per step, the one it writes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagesOfStep:
    """What a step does with the kept pages.

    Attributes:
        source_blocks: ``[n]`` blocks to rotate.
        places: ``[n]`` place in the sequence of each, in blocks.
        pages: ``[n]`` page to write each to.
        block_table: ``[rows, columns]`` page of every page that a row reads.
        num_pages: Pages that must exist.
    """

    source_blocks: torch.Tensor
    places: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    num_pages: int


class RotatedPages:
    """Book of the kept pages. A page is known by its block and its place in the sequence.

    Args:
        capacity: Most pages kept.
        block_size: Tokens per block.
        max_places: Most blocks of a sequence.
    """

    def __init__(self, capacity: int, block_size: int, max_places: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._max_places = max_places
        self._step = 0
        self._num_pages = 0
        self.clear()

    def clear(self) -> None:
        """Forget all pages."""
        # Sorted, so that a step's pages are found by bisection; the other two are aligned with it.
        self._pairs = torch.empty(0, dtype=torch.int64)
        self._pages = torch.empty(0, dtype=torch.int64)
        self._used = torch.empty(0, dtype=torch.int64)
        self._free = torch.arange(self._num_pages - 1, -1, -1)

    def step(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagesOfStep | None:
        """Find the pages of a step.

        Args:
            block_table: ``[rows, columns]`` blocks of each row.
            seq_lens: ``[rows]`` tokens of each row, those of this step included.
            slot_mapping: Slots that the step writes; negative ones are none.

        Returns:
            ``None`` when the step reads more pages than are kept.
        """
        self._step += 1
        self.drop_blocks(slot_mapping[slot_mapping >= 0] // self._block_size)
        counts = (seq_lens.to(torch.int64) + self._block_size - 1) // self._block_size
        width = max(int(counts.max()), 1)
        table = block_table[:, :width].to(torch.int64)
        places = torch.arange(width, dtype=torch.int64)
        reads = places[None, :] < counts[:, None]
        pairs, inverse = torch.unique(
            (table * self._max_places + places)[reads], return_inverse=True
        )
        if pairs.shape[0] > self._capacity:
            return None
        at, known = self._find(pairs)
        self._used[at[known]] = self._step
        missing = pairs[~known]
        taken = self._take(missing.shape[0])
        self._insert(missing, taken)
        at, _ = self._find(pairs)
        pages = self._pages[at]
        paged = torch.zeros(reads.shape, dtype=torch.int32)
        paged[reads] = pages[inverse].to(torch.int32)
        return PagesOfStep(
            source_blocks=missing // self._max_places,
            places=missing % self._max_places,
            pages=taken,
            block_table=paged,
            num_pages=self._num_pages,
        )

    def _find(self, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.searchsorted(self._pairs, pairs)
        inside = at < self._pairs.shape[0]
        known = inside.clone()
        known[inside] = self._pairs[at[inside]] == pairs[inside]
        return at, known

    def drop_blocks(self, blocks: torch.Tensor) -> None:
        """Forget the pages of blocks that are written.

        Args:
            blocks: ``[n]``, in any order.
        """
        if not self._pairs.shape[0]:
            return
        written = torch.unique(blocks)
        # Pairs are sorted by block first, so the pages of one block lie side by side.
        low = torch.searchsorted(self._pairs, written * self._max_places)
        high = torch.searchsorted(self._pairs, (written + 1) * self._max_places)
        count = high - low
        hit = count > 0
        if not bool(hit.any()):
            return
        low, count = low[hit], count[hit]
        first = torch.cumsum(count, 0) - count
        drop = torch.repeat_interleave(low - first, count) + torch.arange(int(count.sum()))
        self._drop(drop)

    def _drop(self, indices: torch.Tensor) -> None:
        keep = torch.ones(self._pairs.shape[0], dtype=torch.bool)
        keep[indices] = False
        self._free = torch.cat((self._free, self._pages[indices]))
        self._pairs, self._pages, self._used = (
            self._pairs[keep],
            self._pages[keep],
            self._used[keep],
        )

    def _take(self, count: int) -> torch.Tensor:
        """Free pages: new ones up to the capacity, then those that have not been read for longest."""
        short = count - self._free.shape[0]
        if short > 0:
            grown = min(self._capacity, max(self._num_pages + short, self._num_pages * 5 // 4))
            self._free = torch.cat((torch.arange(grown - 1, self._num_pages - 1, -1), self._free))
            self._num_pages = grown
            short = count - self._free.shape[0]
        if short > 0:
            # Pages of this step carry the newest mark and come last.
            self._drop(torch.argsort(self._used, stable=True)[:short])
        split = self._free.shape[0] - count
        taken, self._free = self._free[split:], self._free[:split]
        return taken

    def _insert(self, pairs: torch.Tensor, pages: torch.Tensor) -> None:
        if not pairs.shape[0]:
            return
        merged, order = torch.sort(torch.cat((self._pairs, pairs)))
        self._pairs = merged
        self._pages = torch.cat((self._pages, pages))[order]
        used = torch.full((pairs.shape[0],), self._step, dtype=torch.int64)
        self._used = torch.cat((self._used, used))[order]
