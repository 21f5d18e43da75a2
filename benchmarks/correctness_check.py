"""Judges comparisons of answers by what stock vLLM shows against itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from benchmarks.forced_steps import Answers, Comparison, Difference
from benchmarks.report import say

SAME = 0.99
"""Least share of equal greedy tokens, where stock agrees with itself as often; among clear steps always."""
TIMES_NOISE = 2.0
"""Most that mean and 99th percentile of the differences may be, in units of the noise; the maximum has twice that."""
FLOORS = {"float32": 1e-4, "bfloat16": 0.0}
"""Least noise: in float32 on a CPU stock vLLM often repeats itself to the last bit."""


class Check:
    """Collects comparisons and judges them.

    Args:
        floor: Least noise.
    """

    def __init__(self, floor: float) -> None:
        self._shape = self._engine = Difference(1.0, floor, floor, floor)
        self.comparisons: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []

    def noise(self, name: str, left: Answers, right: Answers, engines: bool = False) -> None:
        """Note what stock vLLM shows against itself.

        Args:
            name: Of the comparison.
            left: A run.
            right: Another one.
            engines: Two engines of different kinds: noise for comparisons across engines alone.
        """
        comparison = Comparison(left, right)
        self._engine = self._engine.worse(comparison.difference)
        if not engines:
            self._shape = self._shape.worse(comparison.difference)
        self._note(f"noise: {name}", comparison, self._engine.most, True)

    def like_stock(self, name: str, left: Answers, right: Answers) -> None:
        """The answers must be those of stock vLLM, within the noise between stock engines."""
        self._same(name, left, right, self._engine)

    def unchanged(self, name: str, left: Answers, right: Answers) -> None:
        """The answers must not depend on the cache, within the noise of one engine."""
        self._same(name, left, right, self._shape)

    def different(self, name: str, left: Answers, right: Answers) -> None:
        """The answers must fail the criterion for equal ones: a comparison that cannot fail proves nothing."""
        comparison = Comparison(left, right)
        passed = not _within(comparison, self._engine)
        self._note(f"{name} (must differ)", comparison, self._engine.most, passed)

    def cached(self, name: str, answers: Answers, some: bool) -> None:
        """The first step of each prompt must have found some of its tokens in the cache, or none."""
        counts = [steps[0].cached for steps in answers]
        if any(bool(count) is not some for count in counts):
            self.failures.append(f"{name}: cached tokens {counts}")

    def result(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "noise": dataclasses.asdict(self._engine),
            "comparisons": self.comparisons,
        }

    def _same(self, name: str, left: Answers, right: Answers, noise: Difference) -> None:
        comparison = Comparison(left, right)
        self._note(name, comparison, noise.most, _within(comparison, noise))

    def _note(self, name: str, comparison: Comparison, noise: float, passed: bool) -> None:
        result = comparison.result(noise) | {"ok": passed}
        self.comparisons[name] = result
        if not passed:
            self.failures.append(name)
        clear = "-" if result["same_clear"] is None else f"{result['same_clear']:.4f}"
        say(
            f"{name:<52} {result['steps']:>5} steps, same {result['same']:.4f} (clear {clear}), logprobs "
            f"mean {result['mean']:.2g} p99 {result['p99']:.2g} max {result['max']:.2g}"
            + ("" if passed else "  FAILED")
        )


def _within(comparison: Comparison, noise: Difference) -> bool:
    difference = comparison.difference
    clear = comparison.same_clear(noise.most)
    return (
        _few(1 - difference.same, max(1 - SAME, 1 - noise.same), comparison.steps)
        and (clear is None or clear >= SAME)
        and difference.mean <= TIMES_NOISE * noise.mean
        and difference.p99 <= TIMES_NOISE * noise.p99
        and difference.most <= 2 * TIMES_NOISE * noise.most
    )


def _few(share: float, allowed: float, steps: int) -> bool:
    """Whether a share of unequal steps is no more than an allowed share gives by chance (three deviations)."""
    return share * steps <= allowed * steps + 3 * math.sqrt(allowed * steps)
