"""Prevents: a torn, damaged or foreign file being taken for a block, and a write that leaves something behind."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offload.stores import IDENTITY, block_of, key_of, small_file_system
from vllm_spans.offload import file_format, file_store
from vllm_spans.offload.file_format import HEADER_SIZE, BadFileError, FileError
from vllm_spans.offload.file_store import TEMPORARY, FileStore, verify, walk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, "some/model", IDENTITY)


def read(store: FileStore, number: int) -> bytes:
    buffer = memoryview(bytearray(IDENTITY.payload_size))
    store.read_into(key_of(number), buffer)
    return bytes(buffer)


def reason_of(action: Callable[[], object]) -> str:
    with pytest.raises(FileError) as caught:
        action()
    return caught.value.reason


def test_what_was_written_is_read(store: FileStore) -> None:
    assert not store.contains(key_of(1))
    assert store.write(key_of(1), block_of(1)) == HEADER_SIZE + IDENTITY.payload_size
    assert store.contains(key_of(1))
    assert read(store, 1) == block_of(1)
    assert store.write(key_of(1), block_of(1)) == 0, "stored once"
    verify(store.path(key_of(1)))


def test_two_replicas_write_one_key_at_once(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one begins and ends in the middle of this one's write, with the same process id."""
    other = FileStore(tmp_path, "some/model", IDENTITY)
    write_all = file_store._write_all

    def interrupted(descriptor: int, data: Any) -> None:
        monkeypatch.setattr(file_store, "_write_all", write_all)
        other.write(key_of(1), block_of(1))
        write_all(descriptor, data)

    store.path(key_of(1)).parent.mkdir(parents=True)
    store._numbers, other._numbers = itertools.count(100), itertools.count(100)
    monkeypatch.setattr(file_store, "_write_all", interrupted)
    store.write(key_of(1), block_of(1))
    assert read(store, 1) == read(other, 1) == block_of(1)
    assert not [entry.name for entry in walk(tmp_path) if entry.name.startswith(TEMPORARY)]


def test_another_process_finds_it(store: FileStore, tmp_path: Path) -> None:
    store.write(key_of(1), block_of(1))
    script = (
        "import sys; from pathlib import Path; from tests.offload.test_file_store import *\n"
        "assert read(FileStore(Path(sys.argv[1]), 'some/model', IDENTITY), 1) == block_of(1)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=ROOT)


@settings(max_examples=300)
@given(st.integers(0, HEADER_SIZE + IDENTITY.payload_size - 1), st.integers(0, 7))
def test_a_flipped_bit_is_never_read(position: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(Path(folder), "model", IDENTITY)
        store.write(key_of(1), block_of(1))
        path = store.path(key_of(1))
        data = bytearray(path.read_bytes())
        data[position] ^= 1 << bit
        path.write_bytes(data)
        reason = reason_of(lambda: verify(path))
        assert reason_of(lambda: read(store, 1)) == reason
        expected = {True: {"format", "version", "header"}, False: {"checksum"}}
        assert reason in expected[position < HEADER_SIZE]
        assert not path.exists(), "it would be refused for ever and never be written again"


@settings(max_examples=100)
@given(st.integers(0, HEADER_SIZE + IDENTITY.payload_size + 50))
def test_a_file_of_another_length_is_never_read(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(Path(folder), "model", IDENTITY)
        store.write(key_of(1), block_of(1))
        path = store.path(key_of(1))
        data = path.read_bytes()
        if length == len(data):
            return
        path.write_bytes((data + bytes(100))[:length])
        assert reason_of(lambda: verify(path)) == "truncated"
        assert reason_of(lambda: read(store, 1)) == "truncated"
        assert not path.exists()


OTHERS = {
    "model": dataclasses.replace(IDENTITY, model={"weights": "other"}),
    "geometry": dataclasses.replace(IDENTITY, geometry={"layers": ["0"]}),
    "dtype": dataclasses.replace(IDENTITY, dtype="bfloat16"),
}


@pytest.mark.parametrize("reason", [*OTHERS, "version", "key", "format"])
def test_a_foreign_file_is_refused_by_name(store: FileStore, tmp_path: Path, reason: str) -> None:
    """Files of another identity lie in another folder; these were moved."""
    source = FileStore(tmp_path / "other", "some/model", OTHERS.get(reason, IDENTITY))
    assert reason not in OTHERS or source.folder.name != store.folder.name
    number = 2 if reason == "key" else 1
    source.write(key_of(number), block_of(1))
    data = bytearray(source.path(key_of(number)).read_bytes())
    if reason == "version":
        data[8] += 1
    elif reason == "format":
        data[:8] = b"GGUF    "
    path = store.path(key_of(1))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert reason_of(lambda: read(store, 1)) == reason
    assert not path.exists()


def test_a_header_that_lies_about_its_own_checksum_is_refused(store: FileStore) -> None:
    """Each field is covered: a whole header of other values does not help a payload of the old ones."""
    store.write(key_of(1), block_of(1))
    path = store.path(key_of(1))
    data = bytearray(path.read_bytes())
    data[HEADER_SIZE - 8] ^= 1
    data[HEADER_SIZE - 4 : HEADER_SIZE] = zlib.crc32(data[: HEADER_SIZE - 4]).to_bytes(4, "little")
    path.write_bytes(data)
    assert reason_of(lambda: read(store, 1)) == "checksum"


def test_gone_is_vanished(store: FileStore) -> None:
    assert reason_of(lambda: read(store, 1)) == "vanished"
    store.write(key_of(1), block_of(1))
    subprocess.run(["rm", "-r", str(store.folder)], check=True)
    assert not store.contains(key_of(1))
    assert reason_of(lambda: read(store, 1)) == "vanished"
    store.write(key_of(1), block_of(1))
    assert read(store, 1) == block_of(1)


def test_a_file_in_place_of_the_folder(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("")
    assert reason_of(lambda: store.write(key_of(1), block_of(1))) in ("vanished", "io")
    assert reason_of(lambda: read(store, 1)) == "vanished"


def test_no_permission(store: FileStore, tmp_path: Path) -> None:
    """Root may do everything, so a child of another user tries."""
    store.write(key_of(1), block_of(1))
    store.path(key_of(1)).chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    folder_mode = store.path(key_of(1)).parent
    if os.getuid():
        store.path(key_of(1)).chmod(0)
        folder_mode.chmod(0o500)
    child = os.fork()
    if not child:
        code = 1
        try:
            if not os.getuid():
                os.setuid(65534)
            reasons = []
            for action in (
                lambda: store.read_into(key_of(1), memoryview(bytearray(3000))),
                lambda: store.write(key_of(1)[:1] + bytes(31), block_of(1)),
            ):
                try:
                    action()
                except FileError as error:
                    reasons.append(error.reason)
            code = 0 if reasons == ["permission", "permission"] else 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    folder_mode.chmod(0o700)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.path(key_of(1)).exists(), "a file that cannot be read now may be readable later"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_file_system(folder, "64k") as mounted:
        yield mounted


def test_a_full_disk(small_disk: Path) -> None:
    store = FileStore(small_disk, "model", IDENTITY)
    written = 0
    with pytest.raises(FileError) as caught:
        for written in range(100):
            store.write(key_of(written), block_of(written))
    assert caught.value.reason == "no_space"
    assert 0 < written < 100
    assert not [entry for entry in walk(small_disk) if entry.name.startswith(TEMPORARY)]
    for number in range(written):
        assert read(store, number) == block_of(number)
    assert not store.contains(key_of(written))


def test_a_write_that_fails_half_way_leaves_nothing(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, target: object) -> None:
        raise OSError(5, "input/output error")

    store.write(key_of(2), block_of(2))
    monkeypatch.setattr(os, "replace", fail)
    assert reason_of(lambda: store.write(key_of(1), block_of(1))) == "io"
    monkeypatch.undo()
    assert sorted(entry.name for entry in walk(tmp_path)) == sorted(
        ["about.json", store.path(key_of(2)).name]
    )


def test_many_threads_write_and_read_the_same_keys(store: FileStore) -> None:
    """Two writers of one key write the same; a reader between them sees all or nothing."""
    wrong: list[object] = []

    def work(seed: int) -> None:
        for step in range(60):
            number = (seed + step) % 4
            try:
                store.write(key_of(number), block_of(number))
                if read(store, number) != block_of(number):
                    wrong.append(number)
                if step % 7 == seed:
                    store.path(key_of(number)).unlink(missing_ok=True)
            except BadFileError as error:
                wrong.append(error)
            except FileError as error:
                if error.reason != "vanished":
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_writers_killed_at_random_times(tmp_path: Path) -> None:
    """1,000 writers die by SIGKILL; no reader ever sees a file that is not whole."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.offload.stores", str(tmp_path), "1000", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read_count, missing, leftovers = map(int, done.stdout.split())
    assert read_count > 100 and missing > 10, "the writers never got to write"
    assert leftovers > 10, "no writer was killed in the middle"


def test_the_pure_part_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys\n"
        "import vllm_spans.offload.file_store, vllm_spans.offload.pruning\n"
        "import vllm_spans.offload.settings\n"
        "assert not {'torch', 'vllm'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_the_header_says_what_it_is() -> None:
    """The layout is on disks already: a change of it needs a new version."""
    header = file_format.encode_header(IDENTITY, b"key", b"payload")
    assert header[:8] == b"vspanskv" and header[8:12] == bytes([1, 0, HEADER_SIZE, 0])
    assert HEADER_SIZE == 140
    assert header[12:28] == b"float32".ljust(16, b"\0")
    assert header[124:132] == (7).to_bytes(8, "little")
