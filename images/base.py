"""A base image without a registry: ``python -m images.base`` makes it of Debian packages and prints its name.

The packages come from where this machine's own apt gets them, security updates included; the image keeps no trace of
that address. It is for tests, and for places that reach a Debian mirror but no registry; elsewhere the Containerfiles'
own default base, the official Python image, has the same Debian and Python. Running it again does nothing.

It needs root, and a Debian 12 with apt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from images.tools import TOOLS, Tool
from images.versions import ImageError, say
from images.wheels import folder, locked

SUITE = "bookworm"
NAME = f"localhost/vllm-spans-base:{SUITE}"
KEY_LABEL = "vllm-spans.base-key"
PACKAGES = (
    "ca-certificates",
    "libgomp1",
    "libnuma1",
    "libstdc++6",
    "python3",
    "python3-venv",
    "tini",
)
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LEFT_OUT = ("doc", "info", "locale", "man")


def ensure(tool: Tool) -> str:
    """Make the base unless it is there.

    Args:
        tool: Whose image store it goes into.

    Returns:
        The image's name.

    Raises:
        ImageError: It cannot be made.
    """
    key = hashlib.sha256(repr((SUITE, PACKAGES, _LEFT_OUT)).encode()).hexdigest()[:16]
    if tool.exists(NAME) and tool.labels(NAME).get(KEY_LABEL) == key:
        return NAME
    archive = folder() / "base" / f"{SUITE}-{key}.tar"
    if not archive.exists():
        begin = time.monotonic()
        say(f"{NAME}: installing Debian {SUITE}, about a minute, once")
        archive.parent.mkdir(parents=True, exist_ok=True)
        _bootstrap(archive)
        say(f"{NAME}: done after {time.monotonic() - begin:.0f} s")
    tool.import_archive(archive, NAME, {KEY_LABEL: key})
    return NAME


def install_tools() -> None:
    """Install what builds images without a daemon, and what makes the base.

    Raises:
        ImageError: Something is missing and cannot be installed.
    """
    # runc and podman are for running images; chroot isolation builds without them.
    wanted = ("buildah", "podman", "runc", "mmdebstrap")
    missing = [name for name in wanted if shutil.which(name) is None]
    if not missing:
        return
    packages = [*missing, *(["conmon"] if "podman" in missing else [])]
    if os.geteuid() or shutil.which("apt-get") is None:
        raise ImageError(f"on Debian, as root: apt-get install {' '.join(packages)}")
    say(f"installing {' '.join(packages)}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    _run([*apt, "update"], environ)
    _run([*apt, "install", "-y", "--no-install-recommends", *packages], environ)


def _bootstrap(archive: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        install_tools()
    with tempfile.TemporaryDirectory(prefix="vllm_spans-base-") as scratch:
        sources = Path(scratch) / "sources.list"
        sources.write_text("".join(f"{line}\n" for line in apt_sources()), encoding="utf-8")
        partial = archive.with_suffix(".partial.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        command += ['--aptopt=Acquire::Languages "none"']
        command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT]
        command += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
        # The mirror's address is this machine's business.
        command += [
            '--customize-hook=rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*'
        ]
        command += [SUITE, str(partial), str(sources)]
        _run(command)
        partial.rename(archive)


def apt_sources() -> list[str]:
    """Lines of a sources.list for Debian's main archive and its updates, out of this machine's own configuration.

    Raises:
        ImageError: This machine has no such source.
    """
    wanted = ["--format", "$(ORIGIN)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)"]
    command = ["apt-get", "indextargets", *wanted]
    if not os.geteuid():
        _run(["apt-get", "-qq", "update"])  # what a source is of is known from its lists only
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"this machine has no apt ({error}); pass another --base") from error
    found = {tuple(line.split("|")) for line in listed.stdout.splitlines()}
    lines = [
        f"deb [signed-by={KEYRING}] {address} {codename} {component}"
        for origin, codename, component, address in sorted(found)
        if origin == "Debian" and component == "main" and codename.partition("-")[0] == SUITE
    ]
    if not any(f" {SUITE} " in line for line in lines):
        raise ImageError(f"no apt source of this machine has Debian {SUITE}; pass another --base")
    return lines


def _run(command: Sequence[str], environ: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise ImageError(f"{' '.join(command)[:200]} failed:\n{done.stdout[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the base and print its name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m images.base", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tool", choices=TOOLS, help="default: the first that is installed")
    options = parser.parse_args(arguments)
    try:
        if options.tool is None:
            install_tools()
        with locked():
            print(ensure(Tool(options.tool)))
    except ImageError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
