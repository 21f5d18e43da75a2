"""Every version that an image contains, from where it is pinned: pyproject.toml and requirements/cpu.lock."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "cpu.lock"
# cpu.lock says why: vLLM asks for them, and its text path on a CPU runs without.
LEFT_OUT = frozenset({"torchaudio", "torchcodec", "torchvision", "triton"})


class ImageError(RuntimeError):
    """An image cannot be made; the text says what to do."""


def say(line: str) -> None:
    """Tell how far it is; on standard error, since standard output is for results."""
    print(f"[images] {line}", file=sys.stderr, flush=True)


def project() -> str:
    """Version of vllm_spans."""
    return str(_pyproject()["project"]["version"])


def vllm() -> str:
    """Version of vLLM, the same for CPU and CUDA."""
    (requirement,) = _pyproject()["project"]["optional-dependencies"]["gpu"]
    return str(requirement).partition("==")[2]


def requirements(*extras: str, dependencies: bool = True) -> list[str]:
    """What vllm_spans itself asks for.

    Args:
        extras: Of pyproject.toml.
        dependencies: Whether what it needs without an extra is wanted too.
    """
    found = _pyproject()["project"]
    wanted = list(found["dependencies"]) if dependencies else []
    for extra in extras:
        wanted += found["optional-dependencies"][extra]
    return wanted


def closure(roots: Iterable[str], without: Iterable[str] = ()) -> list[str]:
    """Pins of all that some requirements need, directly or not.

    What needs what is read from the packages of this interpreter, which `make setup` installed from the lock file.

    Args:
        roots: Requirements as pyproject.toml writes them.
        without: Packages to leave out, with what only they need.

    Returns:
        Lines of the lock file, for example ``httpx==0.28.1``, sorted.

    Raises:
        ImageError: A package is needed that the lock file does not pin, or that is not installed here.
    """
    pins = locked()
    todo = [Requirement(root) for root in roots]
    left_out = LEFT_OUT | {canonicalize_name(name) for name in without}
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        extras = frozenset(wanted.extras)
        if (name, extras) in seen or name in left_out:
            continue
        seen.add((name, extras))
        if name not in pins:
            raise ImageError(f"{LOCK.relative_to(ROOT)} pins no {name}; add it, then `make setup`")
        todo += _needs(name, extras)
    return sorted({pins[name] for name, _ in seen})


def locked() -> dict[str, str]:
    """Canonical name -> pin of every package of the lock file."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    pins = [line.partition(";")[0].strip() for line in lines if "==" in line and line[0] != "#"]
    return {canonicalize_name(pin.partition("==")[0]): pin for pin in pins}


def _needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    try:
        texts: Sequence[str] = importlib.metadata.distribution(name).requires or ()
    except importlib.metadata.PackageNotFoundError:
        raise ImageError(
            f"{name} is not installed in this environment; run `make setup` and use .venv/bin/python"
        ) from None
    needs = [Requirement(text) for text in texts]
    cases = extras | {""}
    return [
        each
        for each in needs
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in cases)
    ]


def _pyproject() -> dict[str, dict[str, dict[str, list[str]]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
