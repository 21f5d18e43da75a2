"""A fake server in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from types import TracebackType
from typing import Any

from loadtests.stream import Limits
from loadtests.transport import Target, send


class FakeProcess:
    """The server, alive inside a ``with`` block."""

    def __enter__(self) -> FakeProcess:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadtests", "fake-server", "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()

    def get(self, path: str) -> str:
        """Text of a page."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def log(self) -> dict[str, dict[str, Any]]:
        """What happened, by the requests' ids."""
        return {seen["id"]: seen for seen in json.loads(self.get("/log"))}

    def ask(self, request_id: str, plan: dict[str, Any], **limits: float) -> Any:
        """Send a chat with a plan."""
        body = {"messages": [{"role": "user", "content": "a b c"}], "fake_plan": plan}
        target = Target(self.url, limits=Limits(**limits))
        answer = target.answer()
        send(target, "/v1/chat/completions", json.dumps(body).encode(), request_id, answer)
        return answer
