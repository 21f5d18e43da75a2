"""Server-sent events from bytes that arrive in any pieces; pure.

The parser follows the event stream format of the HTML standard. It works on bytes: line ends never occur inside a
character of UTF-8, so a character that arrives in two pieces needs no care, and a text that is no UTF-8 is left for
the reader to judge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n?|\n")


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event.

    Attributes:
        data: Its ``data`` lines, joined by line ends.
        name: Its ``event`` field; empty when it has none.
    """

    data: bytes
    name: bytes = b""


class SseParser:
    """Turns the bytes of one stream into its events, each as soon as its last byte is there."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that has not ended
        self._data: list[bytes] = []
        self._name = b""
        self._is_first_line = True
        self._ended_with_cr = False
        self._comments = 0

    @property
    def comments(self) -> int:
        """Comment lines so far; servers send them to keep a connection alive."""
        return self._comments

    @property
    def is_inside_event(self) -> bool:
        """Whether bytes of an event have come whose end has not: a stream that ends here has lost its tail."""
        return bool(self._data or self._name or any(self._parts))

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take the next bytes.

        Args:
            chunk: Any number of bytes.

        Returns:
            The events that they complete, in order.
        """
        if not chunk:
            return []
        start = 0
        if self._ended_with_cr and chunk.startswith(b"\n"):
            start = 1
        # The line of a CR has ended already: waiting for a LF would delay its event.
        self._ended_with_cr = chunk.endswith(b"\r")
        events = []
        for end in _LINE_END.finditer(chunk, start):
            self._parts.append(chunk[start : end.start()])
            start = end.end()
            event = self._line(b"".join(self._parts))
            self._parts.clear()
            if event is not None:
                events.append(event)
        if start < len(chunk):
            self._parts.append(chunk[start:])
        return events

    def _line(self, line: bytes) -> SseEvent | None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not field:
            self._comments += 1
        elif field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        # `id` and `retry` are for reconnecting, which a request for tokens never does; others are ignored by rule.
        return None

    def _dispatch(self) -> SseEvent | None:
        event = SseEvent(b"\n".join(self._data), self._name) if self._data else None
        self._data.clear()
        self._name = b""
        return event
