"""When requests are sent; pure, and the same for the same seed.

Open loop: the times are fixed beforehand, whatever the server does, as users who do not know of each other come. A
slow server then faces a queue, as it would in production. Closed loop: a fixed number of users, each of whom sends
when the answer to the former request has come; it never overloads a server, and hides what a queue would do.

What a time means: the *planned* start of a session (of its first turn), in seconds from the start of the run. The
delay from a planned time to the actual sending is measured for every request; it is the generator's fault, not the
server's.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned start.

    Attributes:
        at: Seconds from the start of the run.
        stage: Which step of a ramp it belongs to; 0 everywhere else.
    """

    at: float
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A time of one intended rate.

    Attributes:
        begin: Seconds from the start of the run.
        end: The same, exclusive.
        rate: Sessions per second.
    """

    begin: float
    end: float
    rate: float


@dataclass(frozen=True, slots=True)
class Constant:
    """One session every ``1 / rate`` seconds."""

    rate: float
    duration: float

    def stages(self) -> list[Stage]:
        """Its only stage."""
        return [Stage(0.0, self.duration, self.rate)]

    def times(self, seed: int) -> Iterator[Arrival]:
        """Planned starts, in order."""
        return _even(self.stages()[0], 0)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: exponential gaps with a mean of ``1 / rate`` seconds."""

    rate: float
    duration: float

    def stages(self) -> list[Stage]:
        """Its only stage."""
        return [Stage(0.0, self.duration, self.rate)]

    def times(self, seed: int) -> Iterator[Arrival]:
        """Planned starts, in order."""
        return _exponential(self.stages()[0], 0, seed)


@dataclass(frozen=True, slots=True)
class Bursts:
    """``size`` sessions at once, the bursts at Poisson times; ``rate`` is still of sessions, on average."""

    rate: float
    duration: float
    size: int

    def stages(self) -> list[Stage]:
        """Its only stage."""
        return [Stage(0.0, self.duration, self.rate)]

    def times(self, seed: int) -> Iterator[Arrival]:
        """Planned starts, in order."""
        bursts = _exponential(Stage(0.0, self.duration, self.rate / self.size), 0, seed)
        return (burst for burst in bursts for _ in range(self.size))


@dataclass(frozen=True, slots=True)
class Ramp:
    """Steps of rising (or falling) rate, each long enough to see whether the server keeps up: it finds the knee.

    Attributes:
        first: Rate of the first step, in sessions per second.
        last: Rate of the last one.
        steps: How many; their rates are evenly spaced.
        step_seconds: Length of each.
        even: Evenly spaced sessions inside a step, instead of Poisson.
    """

    first: float
    last: float
    steps: int
    step_seconds: float
    even: bool = False

    def stages(self) -> list[Stage]:
        """The steps."""
        width = (self.last - self.first) / max(1, self.steps - 1)
        return [
            Stage(
                step * self.step_seconds, (step + 1) * self.step_seconds, self.first + width * step
            )
            for step in range(self.steps)
        ]

    def times(self, seed: int) -> Iterator[Arrival]:
        """Planned starts, in order."""
        for number, stage in enumerate(self.stages()):
            yield from _even(stage, number) if self.even else _exponential(stage, number, seed)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The times of a trace.

    Attributes:
        offsets: Seconds from the trace's start, in order.
        speed: How much faster than recorded.
    """

    offsets: tuple[float, ...]
    speed: float = 1.0

    def stages(self) -> list[Stage]:
        """Its only stage, with the mean rate."""
        length = max(self.offsets, default=0.0) / self.speed
        return [Stage(0.0, math.nextafter(length, math.inf), len(self.offsets) / max(length, 1e-9))]

    def times(self, seed: int) -> Iterator[Arrival]:
        """Planned starts, in order."""
        return (Arrival(offset / self.speed) for offset in self.offsets)


OpenLoop = Constant | Poisson | Bursts | Ramp | Recorded


@dataclass(frozen=True, slots=True)
class Closed:
    """A fixed number of users.

    Attributes:
        users: How many; each begins a session when its former one has ended.
        duration: Seconds after which no session begins.
        sessions: How many sessions all users together have at most; ``None``: as many as the time holds.
    """

    users: int
    duration: float
    sessions: int | None = None

    def shares(self, user: int) -> Iterator[int]:
        """The sessions of one user: every ``users``-th, so that the shares do not depend on who is faster."""
        numbers = itertools.count(user, self.users)
        if self.sessions is None:
            return numbers
        limit = self.sessions
        return itertools.takewhile(lambda number: number < limit, numbers)


Arrivals = OpenLoop | Closed


def _even(stage: Stage, number: int) -> Iterator[Arrival]:
    for index in itertools.count():
        at = stage.begin + index / stage.rate
        if at >= stage.end:
            return
        yield Arrival(at, number)


def _exponential(stage: Stage, number: int, seed: int) -> Iterator[Arrival]:
    rng = random.Random(f"arrivals/{seed}/{number}")
    at = stage.begin
    while True:
        at += rng.expovariate(stage.rate)
        if at >= stage.end:
            return
        yield Arrival(at, number)
