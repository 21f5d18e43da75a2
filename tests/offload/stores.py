"""A small file store and its blocks, for the tests of the file tier."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_spans.offload.file_format import FileError, Identity
from vllm_spans.offload.file_store import FileStore

IDENTITY = Identity({"weights": "w"}, {"layers": ["0", "1"]}, "float32", 3000)


def key_of(number: int) -> bytes:
    """Key of a block."""
    return hashlib.sha256(b"key %d" % number).digest()


def block_of(number: int, size: int = IDENTITY.payload_size) -> bytes:
    """What is stored under ``key_of(number)``: known beforehand, different in every part."""
    return random.Random(number).randbytes(size)


def kill_writers(root: str, cycles: int, seed: int) -> None:
    """Run and kill writers; prints how often a block was read, found missing, and found as a leftover.

    Raises:
        AssertionError: A read block is not the one that was written.
        FileError: A file is there and not whole.
    """
    size, count = 200_000, 6
    identity = Identity(IDENTITY.model, IDENTITY.geometry, IDENTITY.dtype, size)
    store = FileStore(Path(root), "model", identity)
    blocks = [block_of(number, size) for number in range(count)]
    rng = random.Random(seed)
    buffer = memoryview(bytearray(size))
    read = missing = 0
    for _ in range(cycles):
        child = os.fork()
        if not child:
            while True:
                for number in range(count):
                    store.path(key_of(number)).unlink(missing_ok=True)
                    store.write(key_of(number), blocks[number])
        try:
            time.sleep(rng.random() / 500)
            for _ in range(rng.randrange(1, 4)):
                number = rng.randrange(count)
                try:
                    store.read_into(key_of(number), buffer)
                    assert buffer == blocks[number], f"block {number} is torn"
                    read += 1
                except FileError as error:
                    if error.reason != "vanished":
                        raise
                    missing += 1
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    leftovers = sum(1 for _ in Path(root).rglob(".tmp-*"))
    print(read, missing, leftovers)


@contextlib.contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in ``folder``; the test is skipped where none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here; it needs root")
    try:
        yield folder
    finally:
        # Lazily: an engine may still hold files.
        subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    kill_writers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
