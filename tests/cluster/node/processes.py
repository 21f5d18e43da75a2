"""Programs that outlive the command that starts them, and are found and ended by their recorded process id."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.node.layout import Folder

GRACE_SECONDS = 20.0


class ProgramError(RuntimeError):
    """A program has ended that should run; the text ends with its last lines."""


class Programs:
    """Background programs of the node.

    Args:
        folder: Where their ids and logs are kept.
        within: Command that each program's own is given to.
    """

    def __init__(self, folder: Folder, within: Sequence[str]) -> None:
        self._folder = folder
        self._within = list(within)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a program in a session of its own.

        Args:
            name: Name of its log.
            command: Program and arguments.
        """
        for folder in (self._folder.logs, self._folder.pids):
            folder.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [*self._within, *command],
                cwd=self._folder.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # With the start time, an id that the system has given to another process since is not taken for ours.
        self._record(name).write_text(f"{process.pid} {_started(process.pid)}")

    def names(self) -> list[str]:
        """Names of the programs that were started and not ended since."""
        return sorted(path.name for path in self._folder.pids.glob("*"))

    def pid(self, name: str) -> int | None:
        """Process id of a program; ``None`` if it does not run."""
        try:
            pid, started = self._record(name).read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if _started(int(pid)) == started else None

    def check(self) -> None:
        """Are all programs still there?

        Raises:
            ProgramError: One has ended.
        """
        for name in self.names():
            if self.pid(name) is None:
                raise ProgramError(
                    f"{name} has ended; the last of {self._log(name)}:\n{self._tail(name)}"
                )

    def stop(self, name: str) -> None:
        """End a program, for good if it does not end by itself in time."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            pid = self.pid(name)
            if pid is None:
                break
            end(pid, signum, GRACE_SECONDS)
        self._record(name).unlink(missing_ok=True)

    def _log(self, name: str) -> Path:
        return self._folder.logs / f"{name}.log"

    def _record(self, name: str) -> Path:
        return self._folder.pids / name

    def _tail(self, name: str) -> str:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-15:])


def end(pid: int, signum: signal.Signals, seconds: float) -> None:
    """Send a signal and wait until the process is gone, at most ``seconds``."""
    started = _started(pid)
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + seconds
    while started and _started(pid) == started and time.monotonic() < deadline:
        time.sleep(0.05)


def with_argument(argument: str) -> list[int]:
    """Ids of the processes whose command line has an argument."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in arguments and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if it runs no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command's name stands in brackets and may hold anything, so fields count from the last bracket.
    fields = stat.rpartition(")")[2].split()
    # An ended child whose parent has not asked for it yet is a zombie.
    return "" if fields[0] == "Z" else fields[19]
