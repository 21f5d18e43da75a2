"""Setups for engines with spans that break them, named on the benchmark's command line."""

from __future__ import annotations

from typing import Any


def rotate_off_by_a_block() -> None:
    """K of later blocks is rotated to a place one block before its own."""
    from tests.engine import faults

    class Process:
        patches: list[Any]

    faults.apply(Process(), "rotation off by a block")
