"""Log lines about many pods: each says something new, and a fleet that fails all at once does not flood the log."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable


class QuietLog:
    """Writes a subject's line when it changes, again after a while, and no more than so many a minute.

    Args:
        logger: Where lines go.
        again: Seconds after which a line that has not changed is written again.
        most: Most lines in a minute; how many were left out is said with the next one.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        logger: logging.Logger,
        again: float = 600.0,
        most: int = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._again = again
        self._most = most
        self._clock = clock
        self._said: dict[str, tuple[str, float]] = {}
        self._times: deque[float] = deque()
        self._left_out = 0

    def say(self, subject: str, line: str, level: int = logging.WARNING) -> None:
        """Write a line about a subject, unless that was said already."""
        now = self._clock()
        last = self._said.get(subject)
        if last is not None and last[0] == line and now - last[1] < self._again:
            return
        self._said[subject] = (line, now)
        while self._times and self._times[0] <= now - 60.0:
            self._times.popleft()
        if len(self._times) >= self._most:
            self._left_out += 1
            return
        self._times.append(now)
        if self._left_out:
            self._logger.warning("%d lines were left out", self._left_out)
            self._left_out = 0
        self._logger.log(level, "%s: %s", subject, line)

    def well(self, subject: str, line: str) -> None:
        """Write that a subject is well again, if anything else was said of it last."""
        if subject in self._said and self._said[subject][0] != line:
            self.say(subject, line, logging.INFO)

    def forget(self, subject: str) -> None:
        """Drop what was said of a subject that is gone."""
        self._said.pop(subject, None)
