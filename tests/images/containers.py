"""Containers of the built images, run as a strict cluster runs them: an arbitrary user, a read-only root, no rights."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from images import versions
from images.build import PREFIX

# Nothing has this number: no line of /etc/passwd, no file of the image.
ARBITRARY_USER = "54321:0"
CACHE = "/var/cache/vllm-spans"


def tag(name: str) -> str:
    """Name of an image as `make images` leaves it."""
    suffix = "-stand-in" if name == "vllm-spans" else ""
    return f"{PREFIX}/{name}:{versions.project()}{suffix}"


@functools.cache
def _environ() -> dict[str, str]:
    """podman's settings for a machine without systemd, cgroups of version 2 or the right to raise limits."""
    path = Path(tempfile.mkdtemp(prefix="vllm_spans-podman-")) / "containers.conf"
    path.write_text(
        "[containers]\n"
        'default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]\n'
        "[engine]\n"
        'runtime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n',
        encoding="utf-8",
    )
    return {**os.environ, "CONTAINERS_CONF": str(path)}


def podman(*arguments: str, timeout: float = 120) -> str:
    """Run podman; returns what it prints.

    Raises:
        RuntimeError: It fails.
    """
    done = subprocess.run(
        ["podman", *arguments],
        env=_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"podman {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def restrictions(*writable: str) -> list[str]:
    """Flags of a container that can write to some folders only, each of them a volume that starts empty."""
    flags = ["--user", ARBITRARY_USER, "--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL"]
    flags += ["--security-opt=no-new-privileges", "--network=host", "--shm-size=256m"]
    for folder in writable:
        flags += ["--tmpfs", f"{folder}:mode=0777"]
    return flags


def output(name: str, *command: str, writable: tuple[str, ...] = ("/tmp",)) -> str:
    """What a program of an image prints, in place of the image's own command."""
    program, *arguments = command
    flags = ["--rm", *restrictions(*writable), "--entrypoint", program]
    return podman("run", *flags, tag(name), *arguments)


def inspect(image: str) -> dict[str, Any]:
    """podman's description of an image."""
    (found,) = json.loads(podman("image", "inspect", image))
    return dict(found)


class Container:
    """A running container; a context manager that removes it.

    Args:
        name: Image.
        arguments: In place of the image's CMD.
        writable: Folders that it can write to.
        environ: Variables to set.
        mounts: Folder or file of this machine -> where it is seen, read-only.
    """

    def __init__(
        self,
        name: str,
        *arguments: str,
        writable: tuple[str, ...] = ("/tmp",),
        environ: dict[str, str] | None = None,
        mounts: dict[Path, str] | None = None,
    ) -> None:
        flags = restrictions(*writable)
        for key, value in (environ or {}).items():
            flags += ["--env", f"{key}={value}"]
        for source, target in (mounts or {}).items():
            flags += ["--volume", f"{source}:{target}:ro"]
        self._id = podman("run", "--detach", *flags, tag(name), *arguments)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *error: object) -> None:
        podman("rm", "--force", "--time", "0", self._id)

    def wait_ready(self, url: str, seconds: float) -> None:
        """Wait until an address answers.

        Raises:
            RuntimeError: The container ended, or the time is over; with its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if httpx.get(url, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if not self._state()["Running"]:
                break
            time.sleep(0.5)
        raise RuntimeError(f"{url} does not answer\n{self.log()[-6000:]}")

    def execute(self, *command: str) -> str:
        """Run a command inside."""
        return podman("exec", self._id, *command)

    def stop(self, patience: int = 60) -> tuple[int, float]:
        """Send SIGTERM, as the kubelet does.

        Returns:
            The exit code, 137 where it had to be killed, and the seconds that it took.
        """
        begin = time.monotonic()
        podman("stop", "--time", str(patience), self._id, timeout=patience + 60)
        return int(self._state()["ExitCode"]), time.monotonic() - begin

    def wait(self, seconds: float) -> int:
        """Wait until it ends by itself; returns the exit code."""
        return int(podman("wait", self._id, timeout=seconds))

    def log(self) -> str:
        """All that it printed."""
        done = subprocess.run(
            ["podman", "logs", self._id], env=_environ(), capture_output=True, text=True, check=True
        )
        return done.stdout + done.stderr

    def _state(self) -> dict[str, Any]:
        (found,) = json.loads(podman("inspect", self._id))
        return dict(found["State"])
