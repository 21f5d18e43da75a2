"""Prevents: a node that ends somebody else's process, leaves its own behind, or hides why it did not start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.node import Folder, processes
from tests.cluster.node.discovery import pod_targets, replace, service_lines
from tests.cluster.node.processes import ProgramError, Programs
from tests.exporter.engines import wait_until

pytestmark = pytest.mark.cluster

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(Folder(tmp_path), [])


def log(programs: Programs, name: str) -> str:
    return programs._log(name).read_text()


def test_a_program_is_found_again_and_ended(programs: Programs, tmp_path: Path) -> None:
    programs.start("sleeper", ["sleep", "600"])
    again = Programs(Folder(tmp_path), [])
    pid = again.pid("sleeper")
    assert pid is not None
    assert again.names() == ["sleeper"]
    again.check()
    begin = time.monotonic()
    again.stop("sleeper")
    assert time.monotonic() - begin < 5
    assert again.pid("sleeper") is None
    assert not again.names()


def test_one_that_does_not_listen_is_killed(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    programs.start("stubborn", [sys.executable, "-c", STUBBORN])
    wait_until(lambda: log(programs, "stubborn"), "it runs")
    pid = programs.pid("stubborn")
    programs.stop("stubborn")
    assert pid is not None
    assert processes._started(pid) == ""


def test_another_process_with_the_same_id_is_left_alone(programs: Programs, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        (tmp_path / "pids").mkdir()
        (tmp_path / "pids" / "etcd").write_text(f"{other.pid} 12345")
        assert programs.pid("etcd") is None
        programs.stop("etcd")
        assert other.poll() is None
        assert not programs.names()
        other.send_signal(signal.SIGKILL)


def test_a_program_that_ended_is_named_with_its_last_lines(programs: Programs) -> None:
    programs.start("broken", ["sh", "-c", "echo no such flag >&2; exit 3"])
    wait_until(lambda: programs.pid("broken") is None, "it ends")
    with pytest.raises(ProgramError, match=r"broken has ended(.|\n)*no such flag"):
        programs.check()


def test_a_node_without_root_is_refused_with_a_reason() -> None:
    command = [sys.executable, "-m", "tests.cluster.node", "up"]
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"},
    )
    assert done.returncode == 1
    assert "needs root" in done.stderr


def service(name: str, address: str | None) -> Any:
    meta = SimpleNamespace(name=name, namespace="llm")
    return SimpleNamespace(metadata=meta, spec=SimpleNamespace(cluster_ip=address))


def pod(address: str | None, *ports: tuple[str | None, int], phase: str = "Running") -> Any:
    made = [SimpleNamespace(name=name, container_port=number) for name, number in ports]
    return SimpleNamespace(
        metadata=SimpleNamespace(name="engine-1", namespace="llm"),
        status=SimpleNamespace(phase=phase, pod_ip=address),
        spec=SimpleNamespace(containers=[SimpleNamespace(name="engine", ports=made or None)]),
    )


def test_services_without_an_address_get_no_name() -> None:
    lines = service_lines([service("b", "10.96.0.9"), service("a", "None"), service("c", None)])
    assert lines == "10.96.0.9 b.llm.svc.cluster.local\n"


def test_running_pods_are_scraped_at_their_named_ports() -> None:
    found = pod_targets(
        [
            pod("10.244.0.3", ("http", 8000), ("rpc", 1234), (None, 1)),
            pod("10.244.0.4", ("metrics", 9405), phase="Pending"),
            pod(None, ("http", 8000)),
            pod("10.244.0.5"),
        ]
    )
    labels = {"namespace": "llm", "pod": "engine-1", "container": "engine"}
    assert found == [{"targets": ["10.244.0.3:8000"], "labels": labels}]


def test_a_file_is_written_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "names"
    assert replace(path, "a\n")
    assert not replace(path, "a\n")
    assert replace(path, "b\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["names"]
