"""Prevents: images that tell of the machine that built them: its secrets, its package index, its mirror.

Every layer is looked through, since a file that a later layer removes is still in the image.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from images.base import apt_sources
from images.build import ALL
from tests.images.containers import inspect, podman, tag

# Addresses that everybody knows stand in packages' own texts.
PUBLIC = {"deb.debian.org", "security.debian.org", "pypi.org", "files.pythonhosted.org"}
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$")
PRIVATE_FILES = (
    ".netrc",
    ".pypirc",
    "pip.conf",
    "id_rsa",
    "id_ed25519",
    ".git-credentials",
    ".git",
)


def package_hosts() -> set[str]:
    """Hosts that pip and apt of this machine are configured with."""
    addresses = [line.split()[2] for line in apt_sources()]
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    addresses += re.findall(r"https?://[^\s'\"]+", listed)
    for name in ("/etc/pip.conf", os.path.expanduser("~/.config/pip/pip.conf")):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(name)
        for section in parser.values():
            addresses += re.findall(r"https?://\S+", " ".join(section.values()))
    addresses += [
        value for key, value in os.environ.items() if key.endswith(("INDEX_URL", "_proxy"))
    ]
    return {host for each in addresses if (host := urlsplit(each).hostname)} - PUBLIC


def secrets() -> set[str]:
    """What this process holds under names that secrets have."""
    return {value for key, value in os.environ.items() if SECRET.search(key) and len(value) >= 8}


def layers(image: str) -> list[Path]:
    """Folder of each layer's own files."""
    data = inspect(image)["GraphDriver"]["Data"]
    found = [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]
    return [Path(each) for each in found]


def finds(folders: list[Path], words: set[str]) -> list[str]:
    """Files that hold one of the words."""
    if not words:
        return []
    patterns = "\n".join(sorted(words))
    command = ["grep", "--recursive", "--files-with-matches", "--fixed-strings", "--text"]
    done = subprocess.run(
        [*command, "--file=-", *map(str, folders)],
        input=patterns,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_layer_tells_of_the_machine(name: str) -> None:
    words = package_hosts() | secrets()
    folders = layers(tag(name))
    assert len(folders) >= 3
    assert finds(folders, words) == []
    found = [path for folder in folders for each in PRIVATE_FILES for path in folder.rglob(each)]
    assert found == []


@pytest.mark.parametrize("name", sorted(ALL))
def test_neither_does_the_description(name: str) -> None:
    text = podman("image", "inspect", tag(name)) + podman("history", "--no-trunc", tag(name))
    for word in package_hosts() | secrets():
        assert word not in text


def test_a_leak_in_a_lower_layer_is_found(tmp_path: Path) -> None:
    """The search must find what it is for, in an image that removes the file again."""
    (tmp_path / "Containerfile").write_text(
        f"FROM {tag('spans-exporter')}\nUSER 0\n"
        "RUN printf planted-%s secret >/tmp/leak\nRUN rm /tmp/leak\nUSER 10001\n"
    )
    image = "localhost/vllm-spans-test-leak"
    podman("build", "--layers", "--isolation=chroot", "--tag", image, str(tmp_path))
    try:
        assert [Path(each).name for each in finds(layers(image), {"planted-secret"})] == ["leak"]
    finally:
        podman("rmi", "--force", image)
