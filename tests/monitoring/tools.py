"""Debian's Prometheus 2.42 and its promtool, as the tests run them."""

from __future__ import annotations

import shutil
import subprocess

MISSING = "{} is not installed: run `make test-monitoring` as root, or `apt-get install prometheus`"


def find(program: str) -> str:
    """Path of ``prometheus`` or ``promtool``.

    Raises:
        RuntimeError: It is not installed. That is no reason to skip: it is what these tests are about.
    """
    path = shutil.which(program)
    if path is None:
        raise RuntimeError(MISSING.format(program))
    return path


def promtool(*arguments: str) -> str:
    """Run promtool.

    Returns:
        What it printed.

    Raises:
        AssertionError: It found a fault, which the error shows.
    """
    done = subprocess.run(
        [find("promtool"), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"promtool {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout
