"""Keeps a shared folder of block files within its limit: the least recently used files go first."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_spans.offload.file_store import ABOUT, SUFFIX, TEMPORARY, versioned, walk

TEMPORARY_AGE = 3600.0
"""Seconds after which a temporary file or an empty folder is taken for the leftover of a process that is gone."""
LOCK = ".prune-lock"

_TARGET = 0.9
_LOOKS_PER_LIMIT = 16


@dataclass(frozen=True)
class Pruned:
    """What a pass deleted and left.

    Attributes:
        files: Files deleted, leftovers included.
        bytes: Their size.
        kept_files: Block files left.
        kept_bytes: Their size, with that of files that are being written.
        busy: Whether another process was pruning, so that nothing was done.
    """

    files: int = 0
    bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0
    busy: bool = False


def prune(root: Path, limit: int, now: float | None = None) -> Pruned:
    """Delete the least recently used block files until the folder is within a limit.

    Leftovers of killed processes go first. Servers may read and write meanwhile: a file that is open stays readable,
    one that is gone is a miss.

    Args:
        root: Folder of the file tier, all models.
        limit: Bytes.
        now: Present time in seconds since the epoch, for tests.
    """
    now = time.time() if now is None else now
    folder = versioned(root)
    with _lock(folder) as mine:
        if not mine:
            return Pruned(busy=True)
        found: list[tuple[float, int, str]] = []
        deleted = deleted_bytes = writing = 0
        for entry in walk(folder):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.startswith(TEMPORARY):
                    if now - status.st_mtime > TEMPORARY_AGE:
                        os.unlink(entry.path)
                        deleted += 1
                        deleted_bytes += status.st_size
                    else:
                        writing += status.st_size
                elif entry.name.endswith(SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found) + writing
        kept = len(found)
        if total > limit:
            found.sort()
            for _, size, path in found:
                if total <= limit * _TARGET:
                    break
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass
                except OSError:
                    continue
                total -= size
                kept -= 1
                deleted += 1
                deleted_bytes += size
        _remove_empty_folders(folder, now)
    return Pruned(deleted, deleted_bytes, kept, total)


class SizeLimit:
    """Prunes from time to time, as files are written.

    A process knows what it wrote itself; what others wrote it sees when it looks. It looks after every sixteenth of the
    limit, so ``n`` processes stay within ``limit * (1 + n / 16)``.

    Args:
        root: Folder of the file tier.
        limit: Bytes; ``None`` for no limit.
    """

    def __init__(self, root: Path, limit: int | None) -> None:
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        # The first write looks: the folder may be full from the start.
        self._unseen = limit or 0

    def wrote(self, count: int) -> Pruned | None:
        """Note that ``count`` bytes were written; prunes if it is time to.

        Raises:
            OSError: The folder cannot be pruned.
        """
        if self._limit is None or not count:
            return None
        with self._lock:
            self._unseen += count
            if self._unseen * _LOOKS_PER_LIMIT < self._limit:
                return None
            self._unseen = 0
        return prune(self._root, self._limit)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether this process alone may prune. A folder that does not exist, or cannot be locked, is free."""
    try:
        descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            # Some network file systems know no locks; then two may prune at once and delete too much.
            pass
        yield True
    finally:
        os.close(descriptor)


def _remove_empty_folders(folder: Path, now: float) -> None:
    """Remove the folders of models that have held no file for a while: one just emptied will be written to again."""
    with contextlib.suppress(OSError):
        for model in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                if not model.is_dir() or now - model.stat().st_mtime < TEMPORARY_AGE:
                    continue
                for part in list(model.iterdir()):
                    if part.is_dir() and now - part.stat().st_mtime > TEMPORARY_AGE:
                        with contextlib.suppress(OSError):
                            part.rmdir()
                if [entry.name for entry in model.iterdir()] == [ABOUT]:
                    (model / ABOUT).unlink()
                    model.rmdir()
