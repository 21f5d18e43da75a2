"""Prevents: workloads with more rights than they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.charts.golden import name_of
from tests.charts.rendering import PRESETS, render
from tests.tooling import environment

ACCEPTED = {
    "CKV_K8S_43": (
        "",
        "images are named by tag unless image.digest is set: a digest is known only after the build",
    ),
    "CKV_K8S_15": (
        "",
        "IfNotPresent with a tag that is not `latest`: pulling gigabytes at each start would delay recovery",
    ),
    "CKV_K8S_38": ("-(exporter|epp)$", "these two find pods by asking the API server"),
    "CKV_K8S_8": ("-test$", "the pod of `helm test` asks three things and ends"),
    "CKV_K8S_9": ("-test$", "the same"),
    "CKV2_K8S_6": ("-test$", "the same; nothing is open in it"),
    "CKV_K8S_40": ("", "the images run under any user; OpenShift chooses it by itself"),
}
"""Check that the presets fail on purpose -> pattern of the objects that may, and why.

One that nothing fails any more has to go.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All that checkov says of all presets."""
    folder = tmp_path_factory.mktemp("renders")
    for preset in PRESETS:
        (folder / f"{name_of(preset)}.yaml").write_text(render(preset=preset).text)
    return checkov(folder)


def checkov(folder: Path) -> list[dict[str, Any]]:
    """Failed checks of the YAML files in a folder, offline.

    Raises:
        AssertionError: It checked nothing.
    """
    bin_dir = environment("checkov")
    command = [bin_dir / "python", bin_dir / "checkov", "--directory", folder]
    command += ["--framework", "kubernetes", "--skip-download", "--output", "json", "--compact"]
    environ = {**os.environ, "LOG_LEVEL": "ERROR", "CHECKOV_RENDER_MAX_ITER": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] and not report["summary"]["parsing_errors"], report
    return report["results"]["failed_checks"]


def described(check: dict[str, Any]) -> str:
    return f"{check['check_id']} {check['file_path']} {check['resource']}: {check['check_name']}"


def accepted(check: dict[str, Any]) -> bool:
    pattern, _ = ACCEPTED.get(check["check_id"], ("$^", ""))
    return re.search(pattern, check["resource"]) is not None


def test_the_presets_fail_only_what_is_accepted(results: list[dict[str, Any]]) -> None:
    found = sorted({described(each) for each in results if not accepted(each)})
    assert not found, "\n".join(found)


def test_nothing_is_accepted_in_vain(results: list[dict[str, Any]]) -> None:
    assert ACCEPTED.keys() <= {each["check_id"] for each in results}


def test_a_privileged_pod_is_found(tmp_path: Path) -> None:
    """A checker that lets it through would pass every chart."""
    container = {"name": "x", "image": "x:1", "securityContext": {"privileged": True}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    (tmp_path / "pod.yaml").write_text(json.dumps({**pod, "spec": {"containers": [container]}}))
    assert "CKV_K8S_16" in {each["check_id"] for each in checkov(tmp_path)}
