"""Environments of tools whose requirements do not go together with the engine's.

Each is made from a lock file in ``requirements`` into the cache folder and kept until the file or the interpreter
changes.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tooling.binaries import ToolError, cache_dir, locked

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
_STAMP = "complete"


@functools.cache
def environment(name: str) -> Path:
    """Folder of the programs of an environment, with its ``python``.

    Args:
        name: Lock file in ``requirements`` without ``.lock``.

    Raises:
        ToolError: A package cannot be installed.
    """
    lock = REQUIREMENTS / f"{name}.lock"
    state = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache_dir() / f"{name}-{state}"
    with locked(folder.name):
        # An environment cannot be moved, so it is built in place and the stamp says that nothing is missing.
        if not (folder / _STAMP).exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"[tools] building the environment {name}", file=sys.stderr, flush=True)
            _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
            _install(folder, lock)
            (folder / _STAMP).touch()
    return folder / "bin"


def _install(folder: Path, lock: Path) -> None:
    # --no-deps: the lock file names every package.
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    command += ["install", "--no-deps", "--quiet", "--disable-pip-version-check"]
    _run(*command, "--requirement", str(lock))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(
            f"{' '.join(command)} failed:\n{done.stderr.strip()}\n"
            "Check the package index that pip is configured with; it is tried again the next time."
        )
