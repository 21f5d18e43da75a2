"""Prevents: notes that name what is not there, or commands that a shell takes apart."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.charts.golden import name_of
from tests.charts.rendering import NAMESPACE, PRESETS, notes, render

PROGRAMS = ("kubectl ", "helm ", "curl ", "vllm-spans ")


def said(values: dict[str, Any] | None = None, preset: str = "cpu-demo") -> str:
    return notes(preset, json.dumps(values or {}))


def commands(text: str) -> Iterator[list[str]]:
    """The commands in it, as a shell takes them apart."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        start = min((at for program in PROGRAMS if (at := line.find(program)) >= 0), default=-1)
        if start < 0 or (start and line[start - 1] not in " ("):
            continue
        # A body in quotes goes on over several lines.
        command = line[start:]
        following = iter(lines[number + 1 :])
        while command.count("'") % 2:
            command += "\n" + next(following)
        yield shlex.split(command)


@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_every_command_names_what_is_installed(preset: Any) -> None:
    rendered = render(preset=preset)
    names = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in rendered.objects}
    found = list(commands(said(preset=name_of(preset))))
    assert {command[0] for command in found} >= {"kubectl", "helm", "curl"}
    for command in found:
        for word in command:
            if word.startswith("service/"):
                assert word in names, command
        if command[0] in ("kubectl", "helm") and "nodes" not in command:
            assert command[command.index("--namespace") + 1] == NAMESPACE, command


def test_the_request_is_json_for_the_served_model() -> None:
    (request,) = [each for each in commands(said()) if each[0] == "curl"]
    body = json.loads(request[request.index("--data") + 1])
    assert body["model"] == "smollm2" and body["documents"]


def test_a_pod_that_finds_no_gpu_is_explained() -> None:
    text = said(preset="multi-gpu")
    assert "Pending" in text and '"Insufficient nvidia.com/gpu": no node has 4 free' in text
    (columns,) = [
        word for command in commands(text) for word in command if word.startswith("custom-columns=")
    ]
    assert columns.endswith(r"GPUS:.status.allocatable.nvidia\.com/gpu"), "the shell ate it"
    assert "nvidia.com/gpu" not in said()


def test_what_stays_after_an_uninstallation_is_said() -> None:
    shared = {"enabled": True}
    assert "claim demo-vllm-spans-kv stays" in said({"offload": {"shared": shared}})
    for other in ({"keep": False}, {"claim": "mine"}):
        assert "kv stays" not in said({"offload": {"shared": shared | other}})
    assert "kv stays" not in said()


def test_parts_are_named_where_they_are_installed() -> None:
    assert "vllm-spans status --url" in said()
    assert "vllm-spans status" not in said({"exporter": {"enabled": False}})
    assert "component=loadtest" in said({"loadtest": {"enabled": True}})
    assert "loadtest" not in said()


def test_a_key_is_asked_for_where_the_engines_want_one() -> None:
    values = {"engine": {"apiKeySecret": {"name": "keys"}}}
    assert "Authorization: Bearer $KEY" in said(values)
    assert "Authorization" not in said()
