"""An engine in a process of its own, so that stock vLLM and vLLM with spans live side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.report import say

ROOT = Path(__file__).resolve().parents[1]
STOCK, SPANS = "stock", "spans"
START_SECONDS = 400.0
ANSWER_SECONDS = 300.0

Request = dict[str, Any]


class EngineError(RuntimeError):
    """The engine process answered with an error, ended, or did not answer in time."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measured request.

    Attributes:
        seconds: To the first and only token.
        cached: Prompt tokens that the engine says it had cached.
    """

    seconds: float
    cached: int


class EngineProcess:
    """An in-process vLLM engine behind a pipe, alive inside a ``with`` block.

    Args:
        name: ``"spans"``, or ``"stock"`` for vLLM without any plugin.
        logs: Folder of the engine's log.
        arguments: Arguments of ``vllm.LLM``.
        environ: Further environment variables.
        setup: ``module:function`` that the process calls before it loads the engine.
        quiet_seconds: Pause before each operation: on a CPU the workers of the engine that was measured
            last go on spinning for more work for about a second.
        label: What it is called in the log; its name if left out.
    """

    def __init__(
        self,
        name: str,
        logs: Path,
        arguments: dict[str, Any],
        environ: dict[str, str] | None = None,
        setup: str | None = None,
        quiet_seconds: float = 0.0,
        label: str | None = None,
    ) -> None:
        self.name = name
        self.label = label or name
        self.info: dict[str, Any] = {}
        self._log = logs / f"{self.label.replace(' ', '-')}.log"
        self._start = {"arguments": arguments, "setup": setup}
        self._environ = environ or {}
        self._quiet_seconds = quiet_seconds
        self._process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        """Start the process without waiting for its engine, once."""
        if self._process is not None:
            return
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=self._environment(),
                start_new_session=True,
            )
        self._send("start", self._start)

    def __enter__(self) -> EngineProcess:
        self.launch()
        try:
            self.info = self._receive("start", START_SECONDS)
            if self.info["spans"] is not (self.name == SPANS):
                raise EngineError(
                    f"{self.label} has the scheduler {self.info['scheduler']}: is vllm_spans installed?"
                )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and the workers that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, op: str, timeout: float = ANSWER_SECONDS, **arguments: Any) -> dict[str, Any]:
        """Run one operation of :class:`benchmarks.engine_child.Child`.

        Raises:
            EngineError: It failed, or there was no answer in ``timeout`` seconds.
        """
        self._send(op, arguments)
        return self._receive(op, timeout)

    def run(self, requests: list[Request], **arguments: Any) -> dict[str, Any]:
        """Run requests; see :meth:`benchmarks.engine_child.Child.run`."""
        time.sleep(self._quiet_seconds)
        return self.ask("run", requests=requests, **arguments)

    def timing(self, request: Request) -> Timing:
        """Run a lone request for one token."""
        answer = self.run([request], max_tokens=1)
        return Timing(answer["seconds"], answer["outputs"][0]["cached"])

    def _send(self, op: str, arguments: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer, which will not come, tells
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()

    def _receive(self, op: str, timeout: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise EngineError(f"{self.label}: no answer to {op} in {timeout:.0f} s\n{self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.label} ended during {op}\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.label}: {op}: {answer['error']}\n{self._tail()}")
        return answer

    def _environment(self) -> dict[str, str]:
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_V1_SPANS_", "VLLM_PLUGINS"))
        }
        environ |= {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")])),
        }
        environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        environ |= {"VLLM_V1_SPANS_ENABLED": "1"} if self.name == SPANS else {"VLLM_PLUGINS": ""}
        return environ | self._environ

    def _tail(self) -> str:
        return "\n".join(self._log.read_text("utf-8", errors="replace").splitlines()[-30:])


@contextlib.contextmanager
def running(*engines: EngineProcess, at_once: bool) -> Iterator[tuple[EngineProcess, ...]]:
    """Engines alive inside a ``with`` block.

    Args:
        *engines: In the order in which they start.
        at_once: Load them at the same time. On a GPU one would take the memory that the other fills for its own.
    """
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
            if at_once:
                engine.launch()
        for engine in engines:
            stack.enter_context(engine)
            say(f"{engine.label} is up: {engine.info}")
        yield engines
