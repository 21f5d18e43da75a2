"""Build the images and the chart, and put them into the node's registry."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import yaml

from tests.cluster.node import REGISTRY, within
from tests.cluster.release import Cluster
from tests.engine.harness import ROOT

IMAGES = ("vllm-spans-cpu", "spans-exporter")
CHART = Path(ROOT) / "charts" / "vllm-spans"
CHARTS = f"oci://{REGISTRY}/charts"


def version() -> str:
    """Version of the project, which the images carry as their tag."""
    text = (Path(ROOT) / "pyproject.toml").read_text(encoding="utf-8")
    found: str = tomllib.loads(text)["project"]["version"]
    return found


def build_images() -> None:
    """Build the images on a local base; the network of the machine is needed, not the node's.

    Raises:
        AssertionError: A build failed; the text is its output.
    """
    _run("build the base", sys.executable, "-m", "images.base")
    _run("build the images", sys.executable, "-m", "images.build", *IMAGES, "--base", "local")


def push_images() -> None:
    """Push them, uncompressed: nothing here is slow but the processor.

    Raises:
        AssertionError: A push failed.
    """
    for name in IMAGES:
        tag = f"{name}:{version()}"
        command = ["buildah", "push", "--tls-verify=false", "--disable-compression"]
        target = f"docker://{REGISTRY}/{tag}"
        _run(f"push {name}", *within(), *command, f"localhost/{tag}", target)


def push_chart(cluster: Cluster, folder: Path) -> list[str]:
    """Package the chart and push it as an OCI artefact.

    Returns:
        The arguments that name it to ``helm install``.
    """
    cluster.helm("package", str(CHART), "--destination", str(folder))
    (package,) = folder.glob("vllm-spans-*.tgz")
    cluster.helm("push", str(package), CHARTS, "--plain-http")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    return [f"{CHARTS}/vllm-spans", "--version", chart["version"], "--plain-http"]


def _run(what: str, *command: str) -> str:
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{what}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    print(f"[cluster] {what}: {time.monotonic() - begin:.0f} s", flush=True)
    return done.stdout
