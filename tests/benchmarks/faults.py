"""Breaks the engine with spans inside a benchmark's engine process."""

from __future__ import annotations

from typing import Any

from tests.engine import faults


class _Process:
    """What ``tests.engine.faults`` asks of an engine process."""

    def __init__(self, child: Any) -> None:
        self.scheduler = child.core.scheduler
        self.patches: list[Any] = []


def apply(child: Any, name: str) -> None:
    """Switch one mechanism off.

    Args:
        child: The :class:`benchmarks.engine_child.Child`.
        name: One of ``tests.engine.faults.FAULTS``.
    """
    child.broken = _Process(child)
    faults.apply(child.broken, name)


def restore(child: Any) -> None:
    """Switch it on again, and forget what was computed without it."""
    faults.restore(child.broken)
    child.reset()
