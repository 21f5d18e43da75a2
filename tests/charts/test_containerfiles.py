"""Prevents: Containerfiles with mistakes that only show when an image runs or grows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.charts.rendering import ROOT
from tests.tooling import environment

FILES = sorted((ROOT / "images").glob("*/Containerfile"))
ACCEPTED = {
    "DL3006": "the base's tag is in the build argument BASE",
    "DL3008": "Debian's mirror keeps only the newest version of a package, so a pinned one vanishes",
    "DL3064": "it takes the TOKEN in TIKTOKEN_RS_CACHE_DIR for a secret",
    "DL4006": "images in OCI's format have no SHELL; what stands before a pipe is an echo",
}
"""Rules that the files break on purpose -> why."""


def hadolint(path: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [environment("charts") / "hadolint", "--format", "json", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_the_four_images_have_one_each() -> None:
    expected = {"vllm-spans", "vllm-spans-cpu", "spans-exporter", "spans-loadtest"}
    assert {path.parent.name for path in FILES} >= expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_containerfile_has_no_mistake(path: Path) -> None:
    found = [
        f"{each['line']}: {each['code']} {each['message']}"
        for each in hadolint(path)
        if each["code"] not in ACCEPTED
    ]
    assert not found, "\n".join(found)


def test_a_mistake_is_found(tmp_path: Path) -> None:
    """A linter that lets it through would pass every file."""
    path = tmp_path / "Containerfile"
    path.write_text("FROM debian:12\nRUN cd /srv && sudo true\nUSER root\n")
    assert {"DL3004", "DL3002"} <= {each["code"] for each in hadolint(path)}
