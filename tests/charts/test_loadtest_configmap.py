"""Prevents: a workload in the cluster that is not the one that was chosen, or that the load cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.workloads import load as load_workload
from tests.charts.rendering import ROOT, refusal, render
from tests.charts.test_loadtest_job import load

WORKLOADS = sorted((ROOT / "loadtests" / "workloads" / "files").glob("*.toml"))


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_each_workload_arrives_as_it_is(helm: int, path: Path) -> None:
    values = load(workload=path.stem, data={"claim": "a", "path": "b"})
    data = render(values, helm=helm).one("ConfigMap", "loadtest")["data"]
    assert data == {"workload.toml": path.read_text(encoding="utf-8")}


def test_a_text_of_ones_own_arrives_and_can_be_read(helm: int, tmp_path: Path) -> None:
    text = (
        'kind = "plain"\n[plain]\nlength = 1000000\n[output]\nmax_tokens = 1\n[arrivals]\n'
        'kind = "constant"\nrate = 1\nduration = 1  # {{ not Helm\'s }}\n'
    )
    data = render(load(workloadText=text), helm=helm).one("ConfigMap", "loadtest")["data"]
    assert data == {"workload.toml": text}
    path = tmp_path / "workload.toml"
    path.write_text(data["workload.toml"], encoding="utf-8")
    assert load_workload(path, None)


def test_the_job_reads_this_map(helm: int) -> None:
    rendered = render(load(), helm=helm)
    name = rendered.one("ConfigMap", "loadtest")["metadata"]["name"]
    volumes = rendered.one("Job", "loadtest")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "workload", "configMap": {"name": name}} in volumes


def test_none_without_being_asked_for(helm: int) -> None:
    assert not render(helm=helm).all("ConfigMap", "loadtest")


@pytest.mark.parametrize(
    "values", [{"workloadText": {"kind": "plain"}}, {"workload": None}, {"workloads": []}]
)
def test_what_is_no_workload_is_refused(helm: int, values: dict[str, object]) -> None:
    assert next(iter(values)) in refusal(load(**values), helm=helm)
