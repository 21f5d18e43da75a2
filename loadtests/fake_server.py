"""A server that speaks OpenAI's HTTP API, has no model, and does exactly what each request's plan says.

It exists to test the load generator: it notes when it sent what, on the clock that the generator uses too
(``CLOCK_MONOTONIC``), so what the generator measured can be compared with what happened.

``GET /log`` is a list of what happened, ``GET /metrics`` has the counters that a comparison with a real server's
uses, ``/health`` and ``/v1/models`` are as with vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loadtests.fake_plan import FakePlan, pieces, steps
from loadtests.fields import WorkloadError
from loadtests.forms import CHAT_PATH, COMPLETIONS_PATH
from loadtests.transport import REQUEST_ID_HEADER

MODEL = "fake"

_REASONS = {200: "OK", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}
_LIMIT = 64 * 1024 * 1024


@dataclass
class Seen:
    """What happened to one request; times are of ``time.monotonic()``.

    Attributes:
        id: The request's own id.
        arrived: When its last byte was read.
        status: Answered status.
        visible: When the last byte of each visible chunk was about to be written.
        done: When ``[DONE]`` was about to be written.
    """

    id: str
    arrived: float
    status: int = 0
    visible: list[float] = field(default_factory=list)
    done: float | None = None


class FakeServer:
    """The server; ``await start()``, then ``await close()``.

    Args:
        default: Plan of requests that carry none.
    """

    def __init__(self, default: FakePlan = FakePlan()) -> None:  # noqa: B008 - frozen
        self.log: list[Seen] = []
        self.counters: Counter[str] = Counter()
        self._default = default
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_LIMIT)
        found = self._server.sockets[0].getsockname()
        return f"http://{found[0]}:{found[1]}"

    async def close(self) -> None:
        """Stop listening. Connections that are open end with their answer."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Cancelled: the server ends while it still has something to say.
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        arrived = time.monotonic()
        if method == "POST" and path in (CHAT_PATH, COMPLETIONS_PATH):
            seen = Seen(headers.get(REQUEST_ID_HEADER, ""), arrived)
            self.log.append(seen)
            return await self._answer(writer, seen, json.loads(content), path == CHAT_PATH)
        await self._info(writer, path)
        return True

    async def _info(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/v1/models":
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path == "/log":
            body = json.dumps([vars(seen) for seen in self.log])
        elif path == "/metrics":
            body = self._metrics()
        elif path == "/health":
            body = ""
        else:
            await _respond(writer, 404, "application/json", b"{}")
            return
        kind = "text/plain" if path == "/metrics" else "application/json"
        await _respond(writer, 200, kind, body.encode())

    def _metrics(self) -> str:
        lines = []
        for name in ("prompt_tokens", "generation_tokens", "request_success"):
            lines.append(f"# TYPE vllm:{name}_total counter")
            lines.append(f'vllm:{name}_total{{model_name="{MODEL}"}} {self.counters[name]}')
        return "\n".join(lines) + "\n"

    async def _answer(
        self, writer: asyncio.StreamWriter, seen: Seen, body: dict[str, Any], is_chat: bool
    ) -> bool:
        try:
            plan = FakePlan.read(body["fake_plan"]) if "fake_plan" in body else self._default
        except WorkloadError as error:
            seen.status = 400
            message = json.dumps({"error": {"message": str(error)}}).encode()
            await _respond(writer, 400, "application/json", message)
            return True
        if plan.refuse:
            writer.transport.abort()
            return False
        seen.status = plan.status
        if plan.status != 200:
            await _sleep_until(seen.arrived + plan.first_delay)
            message = json.dumps(
                {"error": {"message": f"status {plan.status} as planned"}}
            ).encode()
            await _respond(writer, plan.status, "application/json", message)
            return True
        prompt_tokens = _prompt_tokens(body)
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {plan.content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        tokens = plan.tokens
        for step in steps(plan, is_chat, prompt_tokens):
            await _sleep_until(seen.arrived + step.at)
            await self._write(writer, seen, step.data, plan, step.is_visible, step.is_done)
        if plan.tail == "cut":
            await asyncio.sleep(plan.split_pause)  # let what was written arrive before the reset
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.counters["prompt_tokens"] += prompt_tokens
        self.counters["generation_tokens"] += tokens
        self.counters["request_success"] += 1
        return True

    @staticmethod
    async def _write(
        writer: asyncio.StreamWriter,
        seen: Seen,
        data: bytes,
        plan: FakePlan,
        is_visible: bool,
        is_done: bool,
    ) -> None:
        parts = pieces(data, plan.split)
        for index, part in enumerate(parts):
            # "frame" cuts a frame of HTTP; the others are whole frames each.
            frames = [b"%x\r\n%b\r\n" % (len(part), part)]
            if plan.split == "frame" and len(part) > 1:
                frames = [frames[0][: len(frames[0]) // 2], frames[0][len(frames[0]) // 2 :]]
            for number, frame in enumerate(frames):
                if index or number:
                    await asyncio.sleep(plan.split_pause)
                if (index, number) == (len(parts) - 1, len(frames) - 1):
                    now = time.monotonic()
                    if is_visible:
                        seen.visible.append(now)
                    if is_done:
                        seen.done = now
                writer.write(frame)
                await writer.drain()


def _prompt_tokens(body: dict[str, Any]) -> int:
    """A count that depends on the whole prompt: words of a text, or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.split())
    count = 0
    for message in body.get("messages", []):
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        count += sum(len(text.split()) for text in texts)
    return count + sum(len(document["text"].split()) for document in body.get("documents", []))


async def _sleep_until(at: float) -> None:
    wait = at - time.monotonic()
    if wait > 0:
        await asyncio.sleep(wait)


async def _respond(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
    writer.write(
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900, help="0: any (default: 8900)")
    parser.add_argument(
        "--plan", default="{}", help="JSON: the plan of requests that carry no fake_plan"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    try:
        table = json.loads(options.plan)
    except ValueError as error:
        raise WorkloadError(f"--plan is no JSON ({error})") from error
    asyncio.run(_run(FakePlan.read(table), options.host, options.port))
    return 0


async def _run(default: FakePlan, host: str, port: int) -> None:
    server = FakeServer(default)
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    print(await server.start(host, port), flush=True)
    await stop.wait()
    await server.close()
