"""A client that is as simple as can be, to tell what the machine itself adds at this moment."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

_PAUSE = 0.02
_TOKEN = "wörd".encode()


class Control:
    """Asks a fake server now and then in a thread, with a blocking socket, while a load runs.

    Args:
        url: The server.
        plan: Of each request.
        is_over: Whether the load is over; asked before every request.
    """

    def __init__(self, url: str, plan: dict[str, Any], is_over: Callable[[], bool]) -> None:
        self._address = (urlsplit(url).hostname, urlsplit(url).port)
        self._plan = plan
        self._is_over = is_over
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent: dict[str, float] = {}
        self.received: dict[str, list[float]] = {}

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(_PAUSE) and not self._is_over():
            self._ask(f"control-{number}")
            number += 1

    def _ask(self, name: str) -> None:
        body = json.dumps({"messages": [], "fake_plan": self._plan}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nx-request-id: {name}\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        times: list[float] = []
        self.sent[name] = time.monotonic()
        with socket.create_connection(self._address) as connection:
            connection.sendall(request)
            data = b""
            while b"[DONE]" not in data:
                data += connection.recv(65536)
                now = time.monotonic()
                times += [now] * (data.count(_TOKEN) - len(times))
        self.received[name] = times
