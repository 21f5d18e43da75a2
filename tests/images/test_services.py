"""Prevents: an exporter or load-test image that needs root, a writable root filesystem, or a kill to end."""

from __future__ import annotations

from pathlib import Path

import httpx

from demo.server import free_port
from tests.images.containers import Container, output

WORKLOAD = "/opt/loadtests/loadtests/workloads/files/shared_documents.toml"


def test_the_exporter_serves_and_ends_when_told() -> None:
    port, absent = free_port(), free_port()
    arguments = [f"--listen=127.0.0.1:{port}", f"--target=http://127.0.0.1:{absent}/metrics"]
    with Container("spans-exporter", *arguments) as container:
        container.wait_ready(f"http://127.0.0.1:{port}/metrics", 60)
        assert "vllm_spans_fleet" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        code, seconds = container.stop(30)
    assert code == 0
    assert seconds < 10


def test_the_load_test_reads_its_workloads() -> None:
    printed = output("spans-loadtest", "python", "-m", "loadtests", "dry-run", WORKLOAD, "--show=0")
    assert "requests" in printed


def test_the_load_test_runs_and_writes_its_report(tmp_path: Path) -> None:
    """Against the server whose every latency is known, in a second container of the image."""
    workload = tmp_path / "workload.toml"
    workload.write_text(
        'kind = "plain"\n[plain]\nlength = 20\n[body.fake_plan]\ntokens = 2\n'
        '[arrivals]\nkind = "poisson"\nrate = 20\nduration = 1\n'
    )
    port = free_port()
    load = ["run", "/workload.toml", f"--url=http://127.0.0.1:{port}", "--out=/results/run"]
    # A busy machine does not make the image a bad one.
    load += ["--max-delay=60", "--max-lag=60", "--max-cpu=1000"]
    with Container("spans-loadtest", "fake-server", f"--port={port}") as server:
        server.wait_ready(f"http://127.0.0.1:{port}/health", 60)
        writable = ("/tmp", "/results")
        mounts = {workload: "/workload.toml"}
        with Container("spans-loadtest", *load, writable=writable, mounts=mounts) as client:
            assert client.wait(120) == 0, client.log()
            assert "report" in client.log()
        code, seconds = server.stop(30)
    assert code != 137, f"killed after {seconds:.0f} s"
