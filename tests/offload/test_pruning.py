"""Prevents: a shared folder that outgrows its limit, and a prune that deletes what is in use or being written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offload.stores import IDENTITY, block_of, key_of
from vllm_spans.offload.file_format import HEADER_SIZE
from vllm_spans.offload.file_store import TEMPORARY, FileStore, walk
from vllm_spans.offload.pruning import LOCK, TEMPORARY_AGE, SizeLimit, prune

FILE = HEADER_SIZE + IDENTITY.payload_size
ROOT = Path(__file__).resolve().parents[2]


def fill(root: Path, count: int, start: int = 0) -> FileStore:
    """Blocks ``start … start + count``, the later ones used later."""
    store = FileStore(root, "model", IDENTITY)
    for number in range(start, start + count):
        store.write(key_of(number), block_of(number))
        os.utime(store.path(key_of(number)), (1000 + number, 1000 + number))
    return store


def block_bytes(root: Path) -> int:
    return sum(entry.stat().st_size for entry in walk(root) if entry.name.endswith(".kv"))


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(1, 14 * FILE))
def test_the_least_recently_used_go_first(count: int, limit: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = fill(root, count)
        result = prune(root, limit)
        left = [number for number in range(count) if store.contains(key_of(number))]
        assert left == list(range(count - len(left), count))
        assert result.kept_files == len(left)
        assert result.kept_bytes == block_bytes(root) <= max(limit, 0)
        assert result.files + len(left) == count
        if count * FILE <= limit:
            assert len(left) == count, "nothing had to go"
        else:
            assert (len(left) + 1) * FILE > limit * 0.9, "more went than had to"


def test_reading_keeps_a_file(tmp_path: Path) -> None:
    store = fill(tmp_path, 4)
    store.read_into(key_of(0), memoryview(bytearray(IDENTITY.payload_size)))
    prune(tmp_path, 2 * FILE)
    assert store.contains(key_of(0))
    assert not store.contains(key_of(1))


def test_leftovers_go_and_files_being_written_stay(tmp_path: Path) -> None:
    store = fill(tmp_path, 1)
    folder = store.path(key_of(0)).parent
    old, new = folder / f"{TEMPORARY}1-0-x.kv", folder / f"{TEMPORARY}2-0-x.kv"
    for path in (old, new):
        path.write_bytes(bytes(50))
    os.utime(old, (0, time.time() - TEMPORARY_AGE - 5))
    result = prune(tmp_path, 100 * FILE)
    assert (result.files, result.bytes, result.kept_files) == (1, 50, 1)
    assert not old.exists() and new.exists() and store.contains(key_of(0))


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    """The folder may hold what is not ours, below it and beside it."""
    fill(tmp_path, 3)
    mine = [tmp_path / "notes.txt", tmp_path / "v1" / "README", tmp_path / "v0" / "a.kv"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("keep me")
    prune(tmp_path, 1)
    assert all(path.exists() for path in mine)
    assert block_bytes(tmp_path / "v1") == 0


def test_empty_folders_go_and_come_back(tmp_path: Path) -> None:
    store = fill(tmp_path, 3)
    prune(tmp_path, 1)
    assert store.folder.exists(), "it may be written to at this very moment"
    prune(tmp_path, 1, time.time() + TEMPORARY_AGE + 5)
    assert not store.folder.exists()
    store.write(key_of(1), block_of(1))
    assert store.contains(key_of(1)) and (store.folder / "about.json").exists()


def test_one_process_prunes_at_a_time(tmp_path: Path) -> None:
    store = fill(tmp_path, 3)
    script = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "v1" / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout and holder.stdin
    assert holder.stdout.readline() == b"locked\n"
    assert prune(tmp_path, 1).busy
    assert store.contains(key_of(0))
    holder.stdin.close()
    holder.wait()
    assert prune(tmp_path, 1).files == 3


def test_nothing_to_prune(tmp_path: Path) -> None:
    assert prune(tmp_path / "missing", 10).files == 0


@pytest.mark.parametrize("files", [8, 40])
def test_a_writer_stays_within_the_limit(tmp_path: Path, files: int) -> None:
    limit = files * FILE
    size_limit = SizeLimit(tmp_path, limit)
    store = FileStore(tmp_path, "model", IDENTITY)
    pruned = 0
    for number in range(5 * files):
        pruned += size_limit.wrote(store.write(key_of(number), block_of(number))) is not None
        assert block_bytes(tmp_path) <= limit * (1 + 1 / 16) + FILE
    assert store.contains(key_of(5 * files - 1)) and not store.contains(key_of(0))
    assert pruned <= 5 * files * 16 / files + 1, "it looks at the whole folder too often"


def test_a_folder_that_is_full_at_the_start_is_pruned_at_the_first_write(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    size_limit = SizeLimit(tmp_path, 10 * FILE)
    store = FileStore(tmp_path, "model", IDENTITY)
    size_limit.wrote(store.write(key_of(100), block_of(100)))
    assert block_bytes(tmp_path) <= 10 * FILE
    assert store.contains(key_of(100))


def test_two_processes_write_and_prune_while_a_third_reads(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.offload.test_pruning import *\n"
        "root = Path(sys.argv[1]); limit = SizeLimit(root, 12 * FILE)\n"
        "store = FileStore(root, 'model', IDENTITY)\n"
        "for number in range(400):\n"
        "    number = number * int(sys.argv[2]) % 50\n"
        "    limit.wrote(store.write(key_of(number), block_of(number)))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), step], cwd=ROOT)
        for step in ("3", "7")
    ]
    store = FileStore(tmp_path, "model", IDENTITY)
    buffer = memoryview(bytearray(IDENTITY.payload_size))
    found = 0
    while any(writer.poll() is None for writer in writers):
        for number in range(50):
            if store.contains(key_of(number)):
                try:
                    store.read_into(key_of(number), buffer)
                except Exception as error:
                    assert getattr(error, "reason", None) == "vanished", error
                    continue
                assert buffer == block_of(number)
                found += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert found
    prune(tmp_path, 12 * FILE)
    assert block_bytes(tmp_path) <= 12 * FILE
