"""The wheels that go into the images, from whatever package index pip is configured with on this machine.

They lie in a folder outside the checkout and are handed to each build as files, so that a build needs no network and
no image learns where they came from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from images.versions import ROOT, ImageError, say
from requirements.setup_env import TORCH_CPU_INDEX
from vllm_spans.embedded import cache_dir

EPOCH = "1700000000"
"""Time stamp inside our own wheels, so that the same sources give the same file."""


def folder() -> Path:
    """Where images keep what they are made of."""
    return cache_dir() / "images"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep others out of that folder, of this checkout and of others on this machine."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build on this machine")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(pins: Iterable[str]) -> dict[str, Path]:
    """Download what is not there yet.

    Args:
        pins: ``name==version`` each.

    Returns:
        Pin -> wheel.

    Raises:
        ImageError: One cannot be had.
    """
    store = folder() / "wheels"
    store.mkdir(parents=True, exist_ok=True)
    pins = list(pins)
    missing = [pin for pin in pins if pin not in _present(store, pins)]
    torch = [pin for pin in missing if pin.startswith("torch==")]
    if missing:
        say(f"{len(missing)} of {len(pins)} wheels to download")
    if torch:
        # As in setup_env.py: the CPU build of torch is not on PyPI.
        errors = _pip_wheel(store, torch)
        if errors and _pip_wheel(store, [*torch, "--index-url", TORCH_CPU_INDEX]):
            raise ImageError(f"pip finds no {torch[0]}, also not at {TORCH_CPU_INDEX}:\n{errors}")
    rest = [pin for pin in missing if pin not in torch]
    if rest and (errors := _pip_wheel(store, rest)):
        raise ImageError(f"pip could not get a wheel:\n{errors}")
    present = _present(store, pins)
    if absent := [pin for pin in pins if pin not in present]:
        raise ImageError(f"pip fetched no wheel of {', '.join(absent)}")
    return present


def own() -> Path:
    """The wheel of vllm_spans, built from this checkout: one file for all images."""
    with tempfile.TemporaryDirectory(prefix="vllm_spans-wheel-") as scratch:
        # A copy, since setuptools writes into the folder that it builds in.
        source = Path(scratch) / "source"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "vllm_spans", source / "vllm_spans", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, source / name)
        return _build(source, Path(scratch) / "wheels")


def command_metadata() -> Path:
    """The wheel without code that lets the ``vllm`` command of a CPU build find its version."""
    with tempfile.TemporaryDirectory(prefix="vllm_spans-wheel-") as scratch:
        source = Path(scratch) / "source"
        shutil.copytree(ROOT / "requirements" / "vllm-cpu-metadata", source)
        return _build(source, Path(scratch) / "wheels")


def _build(source: Path, target: Path) -> Path:
    for path in [source, *source.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (int(EPOCH), int(EPOCH)))
    if errors := _pip_wheel(target, ["--no-build-isolation", str(source)]):
        raise ImageError(f"the project's own wheel could not be built:\n{errors}")
    (wheel,) = target.glob("*.whl")
    store = folder() / "own"
    store.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, store / wheel.name))


def _present(store: Path, pins: Sequence[str]) -> dict[str, Path]:
    by_key: dict[tuple[str, str], Path] = {}
    for path in store.glob("*.whl"):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        by_key[name, str(version)] = path
    found = {}
    for pin in pins:
        wanted, _, text = pin.partition("==")
        if (canonicalize_name(wanted), text) in by_key:
            found[pin] = by_key[canonicalize_name(wanted), text]
    return found


def _pip_wheel(target: Path, arguments: Sequence[str]) -> str:
    """Put wheels into a folder; returns what went wrong, nothing where all went well."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-qq"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--wheel-dir", str(target)]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    done = subprocess.run(
        [*command, *arguments], env=environ, capture_output=True, text=True, check=False
    )
    return (done.stderr or done.stdout or "pip failed") if done.returncode else ""
