"""What a load costs and what it saves: running estimates from what was measured, and the choice between the two.

Pure: no engine, no clock of its own. All times are seconds.

What is assumed: a copy into the KV cache and a read of files take a fixed time and one in proportion to the bytes;
all runs of a request that come from one tier are one job and share the fixed time; a file is read first and then
copied. Computing costs what one more token adds to a step, the same for every token, though isolated ones attend only
to their own span. A step that the engine runs anyway while a load is on its way costs nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CPU, FILE = "cpu", "file"
TIERS = (CPU, FILE)

WINDOW = 16
"""Samples that an estimate is made of."""
ENOUGH = 4
"""With fewer samples nothing is known."""
FIRST_TRY, LAST_TRY = 8, 64
"""Decisions against a tier before it is tried again: at first, and at most."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds by size.

    Attributes:
        fixed: Seconds at size 0.
        per_unit: Seconds for each byte or token.
    """

    fixed: float
    per_unit: float

    def __call__(self, size: float) -> float:
        """Seconds for a size."""
        return self.fixed + self.per_unit * size


class LinearCost:
    """Seconds of something by its size, from the latest samples.

    The slope is the median of the slopes between any two samples (Theil and Sen), the fixed part the median of what it
    leaves over: a quarter of the samples may be wild. Neither is negative. Sizes that hardly differ tell nothing of a
    fixed part, so all is put on the slope then.

    Args:
        rate: Units per second, when they are given and not measured.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._given = None if rate is None else Line(0.0, 1.0 / rate)
        self._samples: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._line: Line | None = None

    @property
    def given(self) -> bool:
        """Whether an operator has set it."""
        return self._given is not None

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self.given or len(self._samples) >= ENOUGH

    def add(self, size: float, seconds: float) -> None:
        """Take in a measurement; one of nothing says nothing."""
        if size > 0:
            self._samples.append((size, max(0.0, seconds)))
            self._line = None

    def forget(self) -> None:
        """Keep so few of the samples that new ones decide; there is an estimate again after the next one."""
        while len(self._samples) >= ENOUGH:
            self._samples.popleft()
        self._line = None

    @property
    def line(self) -> Line:
        """The estimate; ask ``known`` before."""
        if self._given is not None:
            return self._given
        if self._line is None:
            self._line = _fit(self._samples)
        return self._line


def _fit(samples: Sequence[tuple[float, float]] | deque[tuple[float, float]]) -> Line:
    sizes = [size for size, _ in samples]
    through_zero = Line(0.0, statistics.median(seconds / size for size, seconds in samples))
    if max(sizes) < 2 * min(sizes):
        return through_zero
    points = list(samples)
    slope = statistics.median(
        (one[1] - two[1]) / (one[0] - two[0])
        for index, one in enumerate(points)
        for two in points[:index]
        if one[0] != two[0]
    )
    slope = max(0.0, slope)
    fixed = statistics.median(seconds - slope * size for size, seconds in points)
    return Line(fixed, slope) if fixed >= 0 else through_zero


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one span, or of none, that lie in one tier.

    Attributes:
        tier: Where they are: ``cpu`` or ``file``.
        blocks: How many.
    """

    tier: str
    blocks: int


@dataclass(slots=True)
class _Tries:
    """When a tier that does not pay is tried again: a bad hour must not end its use for ever."""

    declined: int = 0
    patience: int = FIRST_TRY

    def is_due(self) -> bool:
        """Count a decision against the tier; whether it is tried all the same."""
        self.declined += 1
        if self.declined < self.patience:
            return False
        self.declined, self.patience = 0, min(2 * self.patience, LAST_TRY)
        return True

    def reset(self) -> None:
        """The tier pays."""
        self.declined, self.patience = 0, FIRST_TRY


class CostModel:
    """Which blocks are loaded and which are computed.

    Args:
        block_tokens: Tokens per block.
        block_bytes: Bytes per block.
        cpu_bandwidth: Bytes per second from CPU memory into the KV cache, ``None`` to measure it.
        file_bandwidth: Bytes per second from files into CPU memory, ``None`` to measure it.
        recompute_tokens_per_second: Tokens per second of the engine, ``None`` to measure them.
    """

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        cpu_bandwidth: float | None = None,
        file_bandwidth: float | None = None,
        recompute_tokens_per_second: float | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self.loads = {CPU: LinearCost(cpu_bandwidth), FILE: LinearCost(file_bandwidth)}
        self.steps = LinearCost(recompute_tokens_per_second)
        self._tries = {tier: _Tries() for tier in TIERS}

    def add_load(self, tier: str, blocks: int, seconds: float) -> None:
        """Take in a load that ended: a copy from CPU memory, or a read of files."""
        self.loads[tier].add(blocks * self._block_bytes, seconds)

    def add_step(self, tokens: int, seconds: float) -> None:
        """Take in a step of the engine."""
        self.steps.add(tokens, seconds)

    def choose(
        self, runs: Sequence[Run], queued_blocks: int = 0, prefix: bool = False
    ) -> list[bool]:
        """Decide what is loaded, so that loading and computing take the least time together.

        While something is not known yet that a load depends on, it is loaded. A tier that has been decided against many
        times is loaded from once more, so that what is known of it stays true.

        Args:
            runs: What could be loaded.
            queued_blocks: Blocks that are read from files before these.
            prefix: Whether a run is of use only if all before it are loaded too.

        Returns:
            For each run whether it is loaded.
        """
        chosen = self._best(runs, queued_blocks, prefix)
        # All are asked: each counts what was decided.
        due = [self._is_tried(tier, runs, chosen) for tier in TIERS]
        return [True] * len(runs) if any(due) else chosen

    def pays_from_cpu(self, blocks: Sequence[int]) -> list[bool]:
        """For runs of so many blocks whether they would be loaded if CPU memory held them; counts as no decision."""
        return self._best([Run(CPU, count) for count in blocks], 0, False)

    def _best(self, runs: Sequence[Run], queued_blocks: int, prefix: bool) -> list[bool]:
        gains = [self._gain(run) for run in runs]
        if prefix:
            candidates = [
                [index < length for index in range(len(runs))] for length in range(len(runs) + 1)
            ]
        else:
            # The fixed time of the copy is paid for both tiers, so files never come without what pays from CPU memory.
            good = [gain is None or gain > 0 for gain in gains]
            in_cpu = [run.tier == CPU for run in runs]
            candidates = [
                [False] * len(runs),
                [ok and cpu for ok, cpu in zip(good, in_cpu, strict=True)],
                good,
            ]
        return max(candidates, key=lambda taken: self._total(runs, gains, taken, queued_blocks))

    def _gain(self, run: Run) -> float | None:
        """Seconds that a load of a run saves, the fixed times left out; ``None`` while that is not known."""
        path = self._path(run.tier)
        if not self.steps.known or not all(cost.known for cost in path):
            return None
        seconds = sum(cost.line.per_unit for cost in path) * run.blocks * self._block_bytes
        return self.steps.line.per_unit * run.blocks * self._block_tokens - seconds

    def _path(self, tier: str) -> list[LinearCost]:
        return [self.loads[CPU]] if tier == CPU else [self.loads[CPU], self.loads[FILE]]

    def _total(
        self,
        runs: Sequence[Run],
        gains: Sequence[float | None],
        taken: Sequence[bool],
        queued_blocks: int,
    ) -> tuple[int, float]:
        """How many runs of unknown cost a choice loads, and the seconds that it saves otherwise."""
        picked = [index for index, take in enumerate(taken) if take]
        seconds = sum(gain for index in picked if (gain := gains[index]) is not None)
        tiers = {runs[index].tier for index in picked}
        if picked and self.loads[CPU].known:
            seconds -= self.loads[CPU].line.fixed
        if FILE in tiers and self.loads[FILE].known:
            seconds -= self.loads[FILE].line(queued_blocks * self._block_bytes)
        return sum(gains[index] is None for index in picked), seconds

    def _is_tried(self, tier: str, runs: Sequence[Run], chosen: Sequence[bool]) -> bool:
        mine = [taken for run, taken in zip(runs, chosen, strict=True) if run.tier == tier]
        if not mine or self.loads[tier].given:
            return False
        if any(mine):
            self._tries[tier].reset()
            return False
        if not self._tries[tier].is_due():
            return False
        self.loads[tier].forget()
        return True


class StepTimes:
    """What the engine's steps take, from their planning to their end.

    A step that is planned while the one before runs begins when that one ends. Steps that hardly compute prompts say
    nothing of what a prompt's token costs, and are left out.

    Args:
        add: Takes the samples: tokens and seconds.
        clock: Seconds.
    """

    def __init__(self, add: Callable[[int, float], None], clock: Callable[[], float]) -> None:
        self._add = add
        self._clock = clock
        self._planned: deque[tuple[object, float]] = deque(maxlen=WINDOW)
        self._last_end = float("-inf")

    def begin(self, step: object) -> None:
        """A step is planned."""
        self._planned.append((step, self._clock()))

    def end(self, step: object, sequences: int, tokens: int) -> None:
        """A step has ended; steps before it whose end was not told have no output.

        Args:
            step: What ``begin`` was told.
            sequences: Requests and rows in it.
            tokens: Tokens of all of them.
        """
        if not any(step is planned for planned, _ in self._planned):
            return
        planned, begun = self._planned.popleft()
        while planned is not step:
            planned, begun = self._planned.popleft()
        now = self._clock()
        if tokens >= 2 * sequences:
            self._add(tokens, now - max(begun, self._last_end))
        self._last_end = now
