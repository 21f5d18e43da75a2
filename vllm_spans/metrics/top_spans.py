"""Which spans are asked for most, in bounded memory and time per request. Pure.

A space-saving sketch: it counts a bounded number of keys, and a new one takes the place of the one with the lowest
count. Since the new key may have been there before, it inherits that count as its uncertainty; what a key certainly has
is its count less that. A key asked for more often than once in ``capacity`` additions is always among those counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

Key = bytes


class TopSpans:
    """The keys with the highest certain counts. Adding a key costs a few microseconds, whatever the traffic is.

    Args:
        capacity: Keys counted.
        top: Keys reported, fewer than ``capacity``.
    """

    def __init__(self, capacity: int = 1024, top: int = 20) -> None:
        self._capacity = capacity
        self._size = top
        self._counts: dict[Key, int] = {}
        self._uncertain: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []  # one entry a key; its count may be out of date
        self._top: dict[Key, int] = {}
        self._reported: dict[Key, int] = {}
        self._changed = False

    def add(self, keys: Iterable[Key]) -> None:
        """Count each of some keys once more."""
        self._changed = True
        for key in keys:
            count = self._counts.get(key)
            if count is None:
                count = self._uncertain[key] = self._make_room()
                heapq.heappush(self._heap, (count + 1, key))
            self._counts[key] = count + 1
            self._rank(key)

    def take(self) -> dict[Key, int] | None:
        """Certain counts of the top keys.

        Returns:
            All that were asked for at least twice; ``None`` when they are as they were at the last call.
        """
        if not self._changed:
            return None
        self._changed = False
        if self._top == self._reported:
            return None
        self._reported = dict(self._top)
        return dict(self._top)

    def _make_room(self) -> int:
        """Drop the key with the lowest count if there is no room for another.

        Returns:
            That count; 0 when there is room.
        """
        if len(self._counts) < self._capacity:
            return 0
        while True:
            count, key = self._heap[0]
            if count == self._counts[key]:
                break
            heapq.heapreplace(self._heap, (self._counts[key], key))
        heapq.heappop(self._heap)
        del self._counts[key], self._uncertain[key]
        self._top.pop(key, None)  # the next key that is asked for often enough takes its place
        return count

    def _rank(self, key: Key) -> None:
        certain = self._certain(key)
        if certain < 2:
            return
        if key not in self._top and len(self._top) >= self._size:
            lowest = min(self._top, key=self._top.__getitem__)
            if self._top[lowest] >= certain:
                return
            del self._top[lowest]
        self._top[key] = certain

    def _certain(self, key: Key) -> int:
        return self._counts[key] - self._uncertain[key]
