"""buildah and docker, as one: only what the images need of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from images.versions import ImageError

TOOLS = ("buildah", "docker")
_LOCAL = ("localhost", "127.0.0.1")


class Tool:
    """A program that builds images.

    Args:
        name: One of ``TOOLS``; the first that is installed when left out.

    Raises:
        ImageError: It is not installed.
    """

    def __init__(self, name: str | None = None) -> None:
        found = [tool for tool in TOOLS if shutil.which(tool)]
        if name is None:
            name = found[0] if found else None
        if name is None or name not in found:
            raise ImageError(
                f"{name or ' or '.join(TOOLS)} is not installed; on Debian: apt-get install buildah runc"
            )
        self.name = name

    def build(
        self,
        context: Path,
        containerfile: Path,
        tag: str,
        arguments: Mapping[str, str],
        target: str | None = None,
    ) -> None:
        """Build an image.

        Args:
            context: Folder that the file's mounts and copies are relative to.
            containerfile: What to build.
            tag: Name of the image.
            arguments: Build arguments.
            target: Stage to stop at; the last when left out.

        Raises:
            ImageError: With the end of what the program said.
        """
        if self.name == "buildah":
            # chroot: needs neither a daemon nor rights over cgroups, so it works inside of containers too.
            command = ["buildah", "bud", "--layers", "--isolation", "chroot", "--format", "docker"]
            # Else a build that fails leaves its container and a mount behind.
            command += ["--force-rm"]
        else:
            command = ["docker", "build", "--progress", "plain"]
        for key, value in arguments.items():
            command += ["--build-arg", f"{key}={value}"]
        if target is not None:
            command += ["--target", target]
        command += ["--tag", tag, "--file", str(containerfile), str(context)]
        self._run(command)

    def import_archive(self, archive: Path, tag: str, labels: Mapping[str, str]) -> None:
        """Make an image of a tar archive of a root filesystem."""
        if self.name == "docker":
            changes = [f"--change=LABEL {key}={value}" for key, value in labels.items()]
            self._run(
                ["docker", "import", "--change=ENV LANG=C.UTF-8", *changes, str(archive), tag]
            )
            return
        container = self._output(["buildah", "from", "scratch"])
        try:
            self._run(["buildah", "add", "--quiet", container, str(archive), "/"])
            given = [f"--label={key}={value}" for key, value in labels.items()]
            self._run(["buildah", "config", "--env", "LANG=C.UTF-8", *given, container])
            self._run(["buildah", "commit", "--quiet", container, tag])
        finally:
            self._output(["buildah", "rm", container])

    def push(self, tag: str, target: str) -> None:
        """Push an image to a registry; one on this machine is spoken to without TLS, and without compression."""
        if self.name == "docker":
            self._run(["docker", "tag", tag, target])
            self._run(["docker", "push", target])
            return
        command = ["buildah", "push", "--quiet"]
        if target.partition("/")[0].partition(":")[0] in _LOCAL:
            command += ["--tls-verify=false", "--disable-compression"]
        self._run([*command, tag, f"docker://{target}"])

    def exists(self, tag: str) -> bool:
        """Whether an image of this name is stored here."""
        done = subprocess.run(self._inspect(tag), capture_output=True, check=False)
        return done.returncode == 0

    def labels(self, tag: str) -> dict[str, str]:
        """The labels of an image."""
        found = json.loads(self._output(self._inspect(tag)))
        config = found[0]["Config"] if self.name == "docker" else found["Docker"]["config"]
        return dict(config.get("Labels") or {})

    def copy_out(self, tag: str, path: str, target: Path) -> None:
        """Copy a file out of an image."""
        if self.name == "docker":
            container = self._output(["docker", "create", tag])
            try:
                self._output(["docker", "cp", f"{container}:{path}", str(target)])
            finally:
                self._output(["docker", "rm", container])
            return
        container = self._output(["buildah", "from", tag])
        try:
            root = self._output(["buildah", "mount", container])
            shutil.copy2(f"{root}{path}", target)
        finally:
            self._output(["buildah", "rm", container])

    def _inspect(self, tag: str) -> list[str]:
        if self.name == "docker":
            return ["docker", "image", "inspect", tag]
        return ["buildah", "inspect", "--type", "image", tag]

    def _output(self, command: Sequence[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImageError(f"{' '.join(command)[:200]} failed:\n{done.stderr.strip()}")
        return done.stdout.strip()

    def _run(self, command: Sequence[str]) -> None:
        """Run a command; a terminal sees its steps go by, an error carries the end of what it said."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
        )
        last: deque[str] = deque(maxlen=60)
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            if line.startswith(("STEP ", "[", "#")) and sys.stdout.isatty():
                print(f"  {line.rstrip()[:110]}", flush=True)
        if process.wait():
            raise ImageError(
                f"{' '.join(command[:2])} failed; the end of its output:\n{''.join(last)}"
            )
