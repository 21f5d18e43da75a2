"""Blocks of the KV cache that were written by something else than a step, for those who keep what they made of them.

All of it happens in the worker's main thread, between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_blocks: set[int] = set()


def announce(blocks: Iterable[int]) -> None:
    """Say that blocks have new content; before any step reads them."""
    _blocks.update(blocks)


def take() -> list[int]:
    """Blocks announced since the last call."""
    taken = sorted(_blocks)
    _blocks.clear()
    return taken
