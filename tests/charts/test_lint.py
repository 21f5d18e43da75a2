"""Prevents: a chart that Helm 3 or Helm 4 warns about, or cannot pack."""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.charts.golden import name_of
from tests.charts.rendering import CHART, HELMS, PRESETS, ROOT, values_files
from tests.tooling import helm as helm_program


def run_helm(helm: int, *arguments: str) -> str:
    done = subprocess.run(
        [helm_program(helm), *arguments], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("preset", PRESETS, ids=name_of)
def test_a_preset_passes_the_strict_lint(preset: Path, helm: int) -> None:
    files = [f"--values={path}" for path in values_files(preset)]
    said = run_helm(helm, "lint", "--strict", str(CHART), *files)
    assert "[WARNING]" not in said and "[ERROR]" not in said, said


@pytest.mark.parametrize("helm", HELMS)
def test_the_package_holds_what_the_templates_read(helm: int, tmp_path: Path) -> None:
    """A file that .helmignore hides is in the checkout and missing in what users install."""
    run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    for kind in ("rules", "dashboards", "workloads"):
        for path in (CHART / "files" / kind).glob("*"):
            assert str(path.relative_to(CHART)) in names
    assert {"values.schema.json", "README.md", "templates/NOTES.txt"} <= names
    unpacked = run_helm(helm, "template", "demo", str(package), "--values", str(PRESETS[0]))
    assert unpacked.strip() == run_helm(
        helm, "template", "demo", str(CHART), "--values", str(PRESETS[0])
    ).strip()  # fmt: skip


def test_the_version_is_the_projects() -> None:
    """The images' default tag is the chart's appVersion."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == project["version"]
