"""Start a server in a process group of its own, wait until it answers, and stop all of it."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

STOP_SECONDS = 20
_ERROR = re.compile(r"\b\w*(Error|Exception): ")


class ServerError(RuntimeError):
    """The server ended early or did not become ready in time."""


def free_port() -> int:
    """Return a TCP port on the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def stop_on_terminate() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the cleanup of enclosing blocks runs for it too."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Server:
    """A server process, alive inside a ``with`` block and gone after it.

    Args:
        command: Program and arguments.
        port: Port that the command makes it listen on, on 127.0.0.1.
        log: File for its output; the terminal when left out.
        environ: Environment of the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._log = log
        self._environ = None if environ is None else dict(environ)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Server":
        with contextlib.ExitStack() as stack:
            output = None if self._log is None else stack.enter_context(self._log.open("wb"))
            # A session of its own: Ctrl-C reaches only this process, which then ends the group.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env=self._environ,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(
        self, progress: Callable[[float], None] = lambda seconds: None, timeout: float = 600
    ) -> float:
        """Wait until ``/health`` answers.

        Args:
            progress: Called about twice a second with the seconds waited so far.
            timeout: Seconds after which to give up.

        Returns:
            The seconds it took.

        Raises:
            ServerError: The process ended, or the time is over.
        """
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < timeout:
            if self._process is None or self._process.poll() is not None:
                status = None if self._process is None else self._process.returncode
                raise ServerError(f"the server ended with status {status} before it was ready")
            if _answers(f"{self.url}/health"):
                return waited
            progress(waited)
            time.sleep(0.5)
        raise ServerError(f"the server was not ready after {timeout:.0f} s")

    def wait(self) -> int:
        """Wait until the server ends by itself; returns its exit status."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """End the whole process group: politely first, then for good."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with _ctrl_c_ignored():
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
                if _group_ended(process, STOP_SECONDS):
                    return

    def log_tail(self, lines: int = 30) -> str:
        """The lines of the log file that name an error, and its last lines."""
        if self._log is None or not self._log.exists():
            return ""
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        # Several processes write into the log; the cause often stands far above the end.
        errors = [line for line in log[:-lines] if _ERROR.search(line)]
        return "\n".join([*dict.fromkeys(errors), *log[-lines:]])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # not listening yet, or still starting
        return False


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave the server behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _group_ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    # The leader may end before its workers: the group is gone only when no member is left.
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
