"""Prevents: a look at the file tier that is wrong, disturbs a server, or hides a damaged file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.offload.stores import IDENTITY, block_of, key_of
from tests.offload.test_pruning import FILE, fill
from vllm_spans import cli
from vllm_spans.offload.cache_cli import verify_all
from vllm_spans.offload.file_store import TEMPORARY, FileStore

ROOT = Path(__file__).resolve().parents[2]


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    """JSON answer of ``vllm-spans cache``."""
    assert cli.main(["cache", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main(["cache", *map(str, arguments)]) == code
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of four and two blocks, and a leftover."""
    store = fill(tmp_path, 4)
    other = FileStore(tmp_path, "org/other", dataclasses.replace(IDENTITY, dtype="bfloat16"))
    for number in range(2):
        other.write(key_of(number), block_of(number))
    store.path(key_of(0)).with_name(f"{TEMPORARY}1-2-x.kv").write_bytes(b"half")
    return tmp_path


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = answer(capsys, "ls", folder)
    assert [(m["model"], m["dtype"], m["files"], m["bytes"]) for m in models] == [
        ("org/other", "bfloat16", 2, 2 * FILE),
        ("model", "float32", 4, 4 * FILE),
    ]
    assert (models[1]["oldest"], models[1]["newest"]) == (1000, 1003)
    lines = text(capsys, "ls", folder).splitlines()
    assert lines[1].split()[:5] == ["org/other", "bfloat16", "2", "6.1", "KiB"]
    assert lines[2].endswith("d ago")


def test_stat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stat = answer(capsys, "stat", folder)
    assert (stat["models"], stat["files"], stat["bytes"], stat["leftovers"]) == (2, 6, 6 * FILE, 1)
    assert 0 < stat["disk_free"] <= stat["disk_total"]
    assert "size       18.4 KiB" in text(capsys, "stat", folder)


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "verify", folder)["bad"] == []
    assert "all whole" in text(capsys, "verify", folder)
    store = FileStore(folder, "model", IDENTITY)
    path = store.path(key_of(2))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    bad = answer(capsys, "verify", folder, code=1)
    assert bad["bad"] == [{"path": str(path), "reason": "checksum"}]
    assert path.exists()
    assert "1 checksum; 1 deleted" in text(capsys, "verify", folder, "--delete")
    assert not path.exists()
    assert answer(capsys, "verify", folder)["files"] == 5


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "prune", folder, "--limit", 3 * FILE)
    assert (result["files"], result["kept_files"]) == (4, 2)
    assert not FileStore(folder, "model", IDENTITY).contains(key_of(3))
    assert "deleted 0 files" in text(capsys, "prune", folder, "--limit", "1TiB")
    assert FileStore(folder, "model", IDENTITY).path(key_of(0)).parent.is_dir()


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "ls", tmp_path) == []
    assert answer(capsys, "stat", tmp_path)["files"] == 0
    assert answer(capsys, "verify", tmp_path)["files"] == 0
    assert answer(capsys, "prune", tmp_path, "--limit", "1GB")["files"] == 0


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "ls", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    for wrong in (["prune", str(tmp_path), "--limit", "big"], ["prune", str(tmp_path)], []):
        with pytest.raises(SystemExit) as left:
            cli.main(["cache", *wrong])
        assert left.value.code == 2


def test_the_command_starts_at_once_and_without_vllm(folder: Path) -> None:
    script = (
        "import sys; from vllm_spans import cli; code = cli.main(sys.argv[1:])\n"
        "assert not {'torch', 'vllm'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "cache", "stat", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("models     2\n")


def test_verify_while_a_server_writes_and_prunes(tmp_path: Path) -> None:
    """Files come and go: none of that is a finding, and the files that stay are all read."""
    store = FileStore(tmp_path, "model", IDENTITY)
    staying = range(40, 45)
    for number in staying:
        store.write(key_of(number), block_of(number))
    end = threading.Event()
    rounds = 0

    def serve() -> None:
        nonlocal rounds
        while not end.is_set():
            store.write(key_of(rounds % 40), block_of(rounds % 40))
            store.path(key_of((rounds * 7) % 40)).unlink(missing_ok=True)
            rounds += 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        passes = 0
        while passes < 60 or (rounds < 200 and thread.is_alive()):
            passes += 1
            result = verify_all(tmp_path, delete=True)
            assert result.bad == []
            assert result.files >= len(staying)
    finally:
        end.set()
        thread.join()
    assert rounds >= 200
