"""Prevents: a guide whose commands the chart refuses, or that names values, presets and Services that are not there."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.golden import name_of
from tests.charts.rendering import CHART, PRESETS, ROOT
from tests.tooling import helm as helm_program

TEXT = (ROOT / "docs" / "deploy.md").read_text("utf-8")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
_NAMED = re.compile(rf"`((?:{'|'.join(VALUES)})\.[\w.]+)`")
_OWN = re.search(r"```yaml\n\s*# my-values\.yaml\n(.*?)```", TEXT, re.S)


def installs() -> list[list[str]]:
    lines = [line.strip() for line in TEXT.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("helm install ")]


def values_set(words: list[str]) -> Iterator[str]:
    for flag, value in itertools.pairwise(words):
        if flag == "--set":
            yield value.partition("=")[0]


def exists(path: str) -> bool:
    inside: Any = VALUES
    for name in path.split("."):
        if not isinstance(inside, dict) or name not in inside:
            return False
        inside = inside[name]
    return True


def test_there_are_commands_to_hold_to_the_chart() -> None:
    assert len(installs()) == 3 and len(_NAMED.findall(TEXT)) > 25


@pytest.mark.parametrize("words", installs(), ids=lambda words: str(words[2]))
def test_every_installation_of_the_guide_is_taken(
    helm: int, words: list[str], tmp_path: Path
) -> None:
    assert _OWN is not None
    own = tmp_path / "my-values.yaml"
    own.write_text(_OWN[1], "utf-8")
    words = [str(own) if word == own.name else word for word in words]
    words = [word for word in words[2:] if word != "--wait"]
    if "--timeout" in words:
        del words[(at := words.index("--timeout")) : at + 2]
    done = subprocess.run(
        [str(helm_program(helm)), "template", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    names = {
        each["metadata"]["name"]
        for each in yaml.safe_load_all(done.stdout)
        if each and each["kind"] == "Service"
    }
    assert words[0] + "-vllm-spans" in names


def test_every_value_that_is_named_exists() -> None:
    named = {*_NAMED.findall(TEXT), *(each for words in installs() for each in values_set(words))}
    assert sorted(each for each in named if not exists(each)) == []


def test_values_that_do_not_exist_are_seen() -> None:
    assert not exists("engine.shm.sise") and not exists("engine.shm.size.more")
    assert _NAMED.findall("`engine.shm.sise` `other.thing`") == ["engine.shm.sise"]


def test_the_table_of_presets_is_complete() -> None:
    table = set(re.findall(r"^\| `([\w.-]+)` \| ", TEXT.partition("##")[0], re.M))
    assert table == {name_of(each) for each in PRESETS}
