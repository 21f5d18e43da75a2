"""Send one request and read its stream as it comes.

The standard library's HTTP client does it, on a new connection for every request: nothing then waits for a free
connection, and a user's connection time is part of what that user feels. ``read1`` hands out what has arrived, however
little it is. Under gevent's patched sockets the same code runs in a greenlet.
"""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtests.stream import Answer, Limits

REQUEST_ID_HEADER = "x-request-id"
_PIECE = 65536
_SHORTEST_WAIT = 0.001
_ERROR_BODY = 2000
_ERROR_PATIENCE = 5.0


@dataclass(frozen=True)
class Target:
    """A server.

    Attributes:
        url: Its address, with or without ``/v1``.
        api_key: Its key.
        limits: How long answers may take.
    """

    url: str
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url} is no address of a server; write http://HOST:PORT")

    @property
    def base(self) -> str:
        """The address without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """Open a connection.

        Raises:
            OSError: There is none to be had.
        """
        parts = urlsplit(self.url)
        host = str(parts.hostname)
        family, address = self._address
        raw = socket.socket(family, socket.SOCK_STREAM)
        try:
            raw.settimeout(timeout)
            raw.connect(address)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                raw = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
        except BaseException:
            raw.close()
            raise
        connection = http.client.HTTPConnection(host, parts.port, timeout=timeout)
        connection.sock = raw
        return connection

    @functools.cached_property
    def _address(self) -> tuple[socket.AddressFamily, Any]:
        # Once, not for every request: a name is resolved in a thread, whose delay would count as the server's.
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        return found[0][0], found[0][4]

    def answer(self) -> Answer:
        """The answer to a request that is sent now."""
        return Answer(time.monotonic(), self.limits)

    def headers(self, request_id: str) -> dict[str, str]:
        """Headers of a request."""
        found = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Connection": "close",
            REQUEST_ID_HEADER: request_id,
        }
        if self.api_key:
            found["Authorization"] = f"Bearer {self.api_key}"
        return found


def send(target: Target, path: str, body: bytes, request_id: str, answer: Answer) -> None:
    """Send a request and read its answer to its end.

    Args:
        target: The server.
        path: For example ``/v1/chat/completions``.
        body: The request's body.
        request_id: Its id.
        answer: From ``target.answer()``. Its ``outcome`` is set whatever happens, a greenlet that is killed and Ctrl-C
            included; its times are of ``time.monotonic()``.
    """
    headers = target.headers(request_id)
    full_path = urlsplit(target.base).path + path
    connection = None
    try:
        connection = target.connection(_wait(answer))
        _exchange(connection, full_path, body, headers, answer)
    except (OSError, http.client.HTTPException) as error:
        now = time.monotonic()
        if not (isinstance(error, TimeoutError) and answer.expire(now)):
            answer.fail(now, f"{type(error).__name__} {error}")
    except BaseException:  # the run is being ended: the answer is noted all the same
        answer.cancel(time.monotonic())
        raise
    finally:
        if connection is not None:
            connection.close()


def _exchange(
    connection: http.client.HTTPConnection,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    answer: Answer,
) -> None:
    connection.request("POST", path, body=body, headers=dict(headers))
    raw: socket.socket = connection.sock
    _set_timeout(raw, answer)
    response = connection.getresponse()
    answer.head(time.monotonic(), response.status, response.headers.get("content-type", ""))
    if answer.outcome is not None:
        raw.settimeout(_ERROR_PATIENCE)
        text = response.read(_ERROR_BODY).decode("utf-8", "replace")
        answer.detail = f"{answer.detail}: {text}"
        return
    while not answer.expire(time.monotonic()):
        _set_timeout(raw, answer)
        chunk = response.read1(_PIECE)
        now = time.monotonic()
        if chunk:
            answer.body(now, chunk)
        else:
            answer.end(now)


def _wait(answer: Answer) -> float:
    return max(_SHORTEST_WAIT, answer.deadline() - time.monotonic())


def _set_timeout(raw: socket.socket, answer: Answer) -> None:
    raw.settimeout(_wait(answer))
