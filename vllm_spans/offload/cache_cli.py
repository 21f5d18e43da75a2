"""``vllm-spans cache``: look at, check and shrink the folder of a file tier, while servers use it or not.

Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_spans.offload.file_format import FileError
from vllm_spans.offload.file_store import ABOUT, SUFFIX, TEMPORARY, verify, versioned, walk
from vllm_spans.offload.pruning import prune
from vllm_spans.sizes import format_size, parse_size


class CacheError(Exception):
    """The folder cannot be used; the text says why."""


@dataclass
class ModelFiles:
    """Files of one model.

    Attributes:
        folder: Where they are.
        model: Name of the model; ``?`` when the folder does not say.
        dtype: Element type of its KV.
        files: Block files.
        bytes: Their size.
        oldest: When the least recently used one was used, in seconds since the epoch.
        newest: When the most recently used one was.
        leftovers: Temporary files.
    """

    folder: str
    model: str = "?"
    dtype: str = "?"
    files: int = 0
    bytes: int = 0
    oldest: float | None = None
    newest: float | None = None
    leftovers: int = 0


@dataclass
class Verified:
    """Result of a check.

    Attributes:
        files: Files read.
        bytes: Their size.
        bad: Path and reason of each that is not whole.
        deleted: How many of these were deleted.
    """

    files: int = 0
    bytes: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    deleted: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: The command's parser.
    """
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("ls", "the models in the folder, the most recently used first"),
        ("stat", "the folder as a whole"),
        ("verify", "read every file and check that it is whole"),
        ("prune", "delete the least recently used files until the folder is within a limit"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("folder", type=Path, help="`files` of the server's settings")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "verify":
            action.add_argument("--delete", action="store_true", help="delete what is not whole")
        if name == "prune":
            action.add_argument(
                "--limit", type=_size, required=True, metavar="SIZE", help="such as 100GiB or 2TB"
            )


def run(args: argparse.Namespace) -> int:
    """Carry out the command.

    Args:
        args: Parsed arguments of ``add_arguments``.

    Returns:
        The exit code: 0; 1 when files are not whole and stay, or the folder cannot be used.
    """
    actions = {"ls": _ls, "stat": _stat, "verify": _verify, "prune": _prune}
    try:
        if not args.folder.is_dir():
            raise CacheError(f"there is no folder {args.folder}")
        code, answer, text = actions[args.action](args)
    except (CacheError, OSError) as error:
        sys.stderr.write(f"vllm-spans cache: {error}\n")
        return 1
    sys.stdout.write((json.dumps(answer, indent=2) if args.json else text) + "\n")
    return code


def list_models(root: Path) -> list[ModelFiles]:
    """Files by model, the most recently used model first.

    Args:
        root: Folder of the file tier.
    """
    folder = versioned(root)
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_dir():
            continue
        files = ModelFiles(str(path))
        with contextlib.suppress(OSError, ValueError):
            about = json.loads((path / ABOUT).read_text())
            files.model, files.dtype = str(about["model"]), str(about["dtype"])
        for _, size, used, finished in _entries(path):
            if not finished:
                files.leftovers += 1
                continue
            files.files += 1
            files.bytes += size
            files.oldest = used if files.oldest is None else min(files.oldest, used)
            files.newest = used if files.newest is None else max(files.newest, used)
        found.append(files)
    return sorted(found, key=lambda files: -(files.newest or 0))


def verify_all(root: Path, delete: bool) -> Verified:
    """Read every block file.

    Args:
        root: Folder of the file tier.
        delete: Whether to delete what is not whole. A file that a server deletes meanwhile is no finding.
    """
    result = Verified()
    for path, size, _, finished in _entries(versioned(root)):
        if not finished:
            continue
        try:
            verify(Path(path))
        except FileError as error:
            if error.reason == "vanished":
                continue
            result.bad.append((path, error.reason))
            if delete:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
                    result.deleted += 1
        result.files += 1
        result.bytes += size
    return result


def _entries(folder: Path) -> Iterator[tuple[str, int, float, bool]]:
    """Path, size, last use, and whether it is finished, of every file of ours."""
    for entry in walk(folder):
        finished = entry.name.endswith(SUFFIX) and not entry.name.startswith(TEMPORARY)
        if finished or entry.name.startswith(TEMPORARY):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                yield entry.path, status.st_size, status.st_mtime, finished


Answer = tuple[int, Any, str]


def _ls(args: argparse.Namespace) -> Answer:
    models = list_models(args.folder)
    lines = [f"{'MODEL':32} {'DTYPE':9} {'FILES':>9} {'SIZE':>11}  LAST USE"]
    lines += [
        f"{files.model[-32:]:32} {files.dtype:9} {files.files:9} {format_size(files.bytes):>11}  {_ago(files.newest)}"
        for files in models
    ]
    return 0, [vars(files) for files in models], "\n".join(lines)


def _stat(args: argparse.Namespace) -> Answer:
    models = list_models(args.folder)
    used = [time for files in models for time in (files.oldest, files.newest) if time is not None]
    disk = shutil.disk_usage(args.folder)
    answer = {
        "models": len(models),
        "files": sum(files.files for files in models),
        "bytes": sum(files.bytes for files in models),
        "leftovers": sum(files.leftovers for files in models),
        "oldest": min(used, default=None),
        "newest": max(used, default=None),
        "disk_free": disk.free,
        "disk_total": disk.total,
    }
    text = "\n".join(
        (
            f"models     {answer['models']}",
            f"files      {answer['files']}",
            f"size       {format_size(sum(files.bytes for files in models))}",
            f"oldest     used {_ago(min(used, default=None))}",
            f"newest     used {_ago(max(used, default=None))}",
            f"unfinished {answer['leftovers']} files (being written, or left by a killed server)",
            f"disk       {format_size(disk.free)} free of {format_size(disk.total)}",
        )
    )
    return 0, answer, text


def _verify(args: argparse.Namespace) -> Answer:
    result = verify_all(args.folder, args.delete)
    reasons = Counter(reason for _, reason in result.bad)
    lines = [f"{reason}: {path}" for path, reason in result.bad]
    lines.append(
        f"{result.files} files, {format_size(result.bytes)}: "
        + (", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "all whole")
        + (f"; {result.deleted} deleted" if result.deleted else "")
    )
    answer = {**vars(result), "bad": [{"path": p, "reason": r} for p, r in result.bad]}
    return int(len(result.bad) > result.deleted), answer, "\n".join(lines)


def _prune(args: argparse.Namespace) -> Answer:
    result = prune(args.folder, args.limit)
    if result.busy:
        raise CacheError("a server is pruning this folder right now; try again")
    text = (
        f"deleted {result.files} files, {format_size(result.bytes)}; "
        f"{result.kept_files} files, {format_size(result.kept_bytes)} are left"
    )
    return 0, vars(result), text


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ago(moment: float | None) -> str:
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
