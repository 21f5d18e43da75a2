"""Rows, spreads and the result file of a benchmark."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_START = time.monotonic()


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[bench {time.monotonic() - _START:6.1f}] {text}", flush=True)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of measurements."""
        return cls(statistics.median(values), min(values), max(values))


def row(
    work: str,
    stock: float,
    spans: float,
    unit: str,
    *,
    floor: float | None = None,
    goal: float | None = None,
    more_is_better: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """One line of the result file.

    Args:
        work: What was done.
        stock: Measured with stock vLLM.
        spans: Measured with spans.
        unit: Of both.
        floor: What cannot be undercut, in the same unit.
        goal: Least ratio.
        more_is_better: ``ratio`` is spans / stock; otherwise stock / spans. A larger ratio is always better.
        **more: Further fields.
    """
    ratio = spans / stock if more_is_better else stock / spans
    return {
        "work": work,
        "stock": stock,
        "spans": spans,
        "unit": unit,
        "ratio": ratio,
        "floor": floor,
        "goal": goal,
        "met": None if goal is None else ratio >= goal,
        **more,
    }


def line(entry: dict[str, Any]) -> str:
    """A row for the terminal."""
    verdict = {True: "met", False: "NOT met", None: ""}[entry["met"]]
    stock, spans, ratio = (f"{entry[name]:.4g}" for name in ("stock", "spans", "ratio"))
    unit = f"{entry['unit']:<2}"
    return f"{entry['work']:<62} stock {stock:>9} {unit}  spans {spans:>9} {unit}  ratio {ratio:>6}  {verdict}".rstrip()


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result file: numbers to four digits; replaced in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def meta(module: str, arguments: Sequence[str], packages: Iterable[str]) -> dict[str, Any]:
    """How and where a result was made.

    Args:
        module: What ``python -m`` runs.
        arguments: Of the command; of absolute paths, which mean nothing elsewhere, only the name is kept.
        packages: Whose versions matter; one that is not installed is left out.
    """
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "command": " ".join([f"python -m {module}", *map(_portable, arguments)]),
        "commit": commit(),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "date": datetime.date.today().isoformat(),
    }


def _portable(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def commit() -> str | None:
    """The commit that runs, marked if files differ from it; ``None`` outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()
