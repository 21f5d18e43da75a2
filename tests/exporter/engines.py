"""Small HTTP servers on loopback addresses that answer as engine pods do, well or badly.

What they answer well is the page of a real engine, with the numbers of its spans replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("engine_page.txt").read_text(encoding="utf-8")
MODEL = "tiny"
GIB = 1 << 30

Behaviour = Callable[["EnginePod", asyncio.StreamWriter], Coroutine[Any, Any, None]]


def engine_page(
    counters: Mapping[str, float] | None = None,
    *,
    model: str = MODEL,
    started: float | None = None,
    hot: Mapping[str, float] | None = None,
) -> str:
    """A real engine's page with other numbers.

    Args:
        counters: Name without prefix, ``lookup_tokens`` or ``reused_tokens/gpu`` -> value; the others are 0.
        model: Name that the model is served under.
        started: When the process started; ``None`` for a page of several API servers, which does not say.
        hot: Requests by hot span.
    """
    wanted = dict(counters or {})

    def number(found: re.Match[str]) -> str:
        own = re.search(r'(?:tier|policy|outcome|reason|kind)="([^"]*)"', found[2] or "")
        key = f"{found[1]}/{own[1]}" if own else found[1]
        return f"vllm_spans_{found[1]}_total{found[2] or ''} {float(wanted.pop(key, 0.0))}"

    page = re.sub(r"^vllm_spans_(\w+)_total(\{.*\})? \S+$", number, PAGE, flags=re.MULTILINE)
    assert not wanted, f"the engine's page has no {sorted(wanted)}"
    page = page.replace(f'model_name="{MODEL}"', f'model_name="{model}"')
    line = "" if started is None else f"process_start_time_seconds {started}\n"
    page = re.sub(r"^process_start_time_seconds .*\n", line, page, flags=re.MULTILINE)
    page = re.sub(r"^vllm_spans_hot_span_requests\{.*\n", "", page, flags=re.MULTILINE)
    for span, requests in (hot or {}).items():
        page += f'vllm_spans_hot_span_requests{{engine="0",model_name="{model}",span="{span}"}} {requests}\n'
    return page


class EnginePod:
    """One server. Its attributes may be changed while it runs.

    Attributes:
        page: What it answers.
        behave: How it answers.
        asked: How often it was asked.
        request: First line of the last request.
    """

    def __init__(self, page: str = "") -> None:
        self.page = page
        self.behave: Behaviour = answer_well
        self.asked = 0
        self.request = ""
        self.host, self.port = "", 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    async def open(self, host: str, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._answer, host, port)
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ended):
            head = await reader.readuntil(b"\r\n\r\n")
            self.request = head.decode().partition("\r\n")[0]
            self.asked += 1
            await self.behave(self, writer)
            await writer.drain()
        writer.close()


async def answer_well(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """The whole page."""
    writer.write(_answer(pod.page.encode()))


async def hang(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """Nothing at all, with the connection open."""
    await asyncio.sleep(3600)


async def drip(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """Byte after byte: never silent, and not done for a very long time."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        writer.write(b"#")
        await writer.drain()
        await asyncio.sleep(0)


async def answer_garbage(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """Bytes that are no text, as metrics."""
    writer.write(_answer(bytes(range(256)) * 16))


async def answer_no_http(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """Bytes that are no HTTP."""
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00 not HTTP at all\r\n\r\n")


async def answer_html(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """The page, as one for people."""
    writer.write(_answer(pod.page.encode(), kind="text/html"))


async def answer_half_a_line(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """A page cut in one of the lines that are read, the length of what is left being right."""
    page = pod.page.encode()
    writer.write(_answer(page[: page.index(b"vllm_spans_reused_tokens_total") + 20]))


async def break_off(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """Half of what the length says."""
    answer = _answer(pod.page.encode())
    writer.write(answer[: len(answer) // 2])


async def answer_500(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """An error of the server."""
    writer.write(_answer(b"oh no\n", status="500 Internal Server Error"))


async def answer_a_gibibyte(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
    """1 GiB of well-formed lines."""
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {GIB}\r\n\r\n".encode()
    )
    chunk = b"# one more line\n" * 4096
    for _ in range(GIB // len(chunk)):
        writer.write(chunk)
        await writer.drain()


def _answer(body: bytes, status: str = "200 OK", kind: str = "text/plain; version=1.0.0") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


class EnginePods:
    """Servers in a thread of their own; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._pods: list[EnginePod] = []

    def __enter__(self) -> EnginePods:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self._pods:
            self.close(pod)
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def open(self, page: str = "", host: str = "127.0.0.1", port: int = 0) -> EnginePod:
        """Start a server."""
        pod = EnginePod(page)
        asyncio.run_coroutine_threadsafe(pod.open(host, port), self._loop).result(30)
        self._pods.append(pod)
        return pod

    def close(self, pod: EnginePod) -> None:
        """Stop a server."""
        asyncio.run_coroutine_threadsafe(pod.close(), self._loop).result(30)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Wait until something is true.

    Returns:
        The condition's last value.

    Raises:
        AssertionError: It is not, long after it should be.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return value
