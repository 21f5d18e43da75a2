"""Prevents: an exporter that works on made-up events only, and crashes, stalls or miscounts on a real API server when
pods come and go, misbehave, or the right to see them is missing.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.fleet import ClusterPod, FleetNamespace
from tests.exporter import engines
from tests.exporter.engines import EnginePod, engine_page, wait_until
from tests.exporter.process import ExporterProcess

pytestmark = pytest.mark.cluster

REUSED = 0.75
CHURNED = 50
CHURN_SECONDS = 0.5  # with what a step takes besides, more than 50 a minute
FLAGS = ("--interval", "0.5", "--timeout", "0.4", "--window", "20")


def exporter(fleet: FleetNamespace, *flags: str) -> ExporterProcess:
    return ExporterProcess("--kubeconfig", str(fleet.credentials), *FLAGS, *flags)


class BusyPod:
    """A pod whose counters grow by the same amounts at every scrape, until it is frozen."""

    def __init__(self, fleet: FleetNamespace, age: float = 0.0, requests: int = 0) -> None:
        self.started = time.time() - age
        self.requests = requests
        # The fleet does not count what a pod did long before the exporter came.
        self.uncounted = requests if age else 0
        self.frozen = False
        self.pod: ClusterPod = fleet.add(self.page(requests))
        self.pod.server.behave = self.answer

    def page(self, requests: int) -> str:
        lookup = 1024.0 * requests
        return engine_page(
            {
                "lookup_tokens": lookup,
                "reused_tokens/gpu": lookup * REUSED,
                "isolated_tokens": lookup * (1 - REUSED),
                "gap_tokens/legolink": lookup / 8,
                "requests/partial": requests,
            },
            started=self.started,
        )

    async def answer(self, server: EnginePod, writer: object) -> None:
        if not self.frozen and server.asked > 1:
            self.requests += 1
            server.page = self.page(self.requests)
        await engines.answer_well(server, writer)  # type: ignore[arg-type]

    def restart(self) -> None:
        """Begin anew, and by the next scrape have counted more than ever before."""
        before = self.counted
        self.requests += 7
        self.uncounted = -before
        self.started = time.time()

    @property
    def counted(self) -> int:
        """Requests that the fleet must count of it."""
        return self.requests - self.uncounted


def test_churn_of_pods_neither_jumps_nor_loses(fleet: FleetNamespace) -> None:
    fleet.grant()
    pods = [BusyPod(fleet, age=86400.0, requests=1_000_000) for _ in range(6)]
    with exporter(fleet, "--namespace", fleet.name) as process:
        process.wait_ready()
        ratios, totals = [], []
        frozen: list[BusyPod] = []
        gone: list[BusyPod] = []
        for step in range(CHURNED + 5):
            if step < CHURNED:
                pods.append(BusyPod(fleet))
                pods[step].frozen = True
                frozen.append(pods[step])
            if step == CHURNED // 2:
                pods[-1].restart()
            if len(frozen) > 5 or step >= CHURNED:
                gone.append(frozen.pop(0))
                fleet.delete(gone[-1].pod)
            ratio = process.value("vllm_spans_fleet_reuse_ratio", model="tiny")
            ratios += [] if ratio is None else [ratio]
            totals.append(process.value("vllm_spans_fleet_requests_total", outcome="partial") or 0)
            time.sleep(CHURN_SECONDS)
        for pod in pods:
            pod.frozen = True
        expected = sum(pod.counted for pod in pods)
        wait_until(
            lambda: process.value("vllm_spans_fleet_requests_total", outcome="partial") == expected,
            f"{expected} requests are counted",
        )
        assert len(ratios) > CHURNED / 2
        assert set(ratios) == {REUSED}, "a pod that came or went moved the ratio"
        assert totals == sorted(totals), "a counter of the fleet fell"
        alive = len(pods) - len(gone)
        wait_until(
            lambda: process.value("vllm_spans_fleet_pods", model="tiny", state="ready") == alive,
            f"{alive} pods are ready",
        )
        counters = {"lookup_tokens": 1024.0, "isolated_tokens": 1024.0 * (1 - REUSED)}
        for name, tokens in counters.items():
            value = process.value(f"vllm_spans_fleet_{name}_total", model="tiny")
            assert value == expected * tokens, name
        events = {
            labels["type"]: value
            for labels, value in process.samples("vllm_spans_exporter_watch_events_total")
        }
        assert events["ADDED"] >= CHURNED
        assert events["DELETED"] == len(gone)
        assert process.value("vllm_spans_exporter_watch_connected") == 1
        assert not process.samples("vllm_spans_exporter_watch_failures_total")
        assert process.end() == 0


def test_pods_that_misbehave_are_told_apart_and_hold_nobody_up(fleet: FleetNamespace) -> None:
    fleet.grant()
    bad = {
        "timeout": engines.hang,
        "invalid": engines.answer_garbage,
        "too_large": engines.answer_a_gibibyte,
        "http_error": engines.answer_500,
    }
    names = {}
    for state, behave in bad.items():
        pod = fleet.add()
        pod.server.behave = behave
        names[state] = pod.name
    gone = fleet.add()
    fleet._servers.close(gone.server)
    names["unreachable"] = gone.name
    starting = fleet.add(ready=False)
    good = [BusyPod(fleet, age=60.0), BusyPod(fleet, age=60.0)]
    named = fleet.add(named_port=True)
    # 8 MiB have to fit into the time-out, or the pod that answers too much is only slow.
    with exporter(fleet, "--interval", "2", "--timeout", "1.9") as process:
        process.wait_ready()
        memory = process.resident_mib()
        asked = [pod.pod.server.asked for pod in good]
        for state, name in names.items():
            wait_until(
                lambda state=state: process.value("vllm_spans_fleet_pods", state=state) == 1,
                f"a pod is {state}",
            )
            wait_until(
                lambda state=state: (
                    (process.value("vllm_spans_exporter_scrapes_total", result=state) or 0) > 3
                ),
                f"pods that are {state} are asked again",
            )
            assert f"{fleet.name}/{name}: {state}:" in process.log()
        ages = {
            labels["pod"]: age
            for labels, age in process.samples("vllm_spans_fleet_pod_last_scrape_age_seconds")
        }
        for pod, before in zip(good, asked, strict=True):
            assert pod.pod.server.asked > before + 3
            assert ages[f"{fleet.name}/{pod.pod.name}"] < ages[f"{fleet.name}/{names['timeout']}"]
        assert process.value("vllm_spans_fleet_pods", model="tiny", state="ready") == 3
        assert process.value("vllm_spans_fleet_pods", model="tiny", state="not_ready") == 1
        assert starting.server.asked, "what a pod counts before it is ready is not lost"
        assert named.server.asked
        assert process.value("vllm_spans_fleet_reuse_ratio", model="tiny") == REUSED
        assert process.resident_mib() < memory + 64, "a page of 1 GiB was kept in memory"
        for name in names.values():
            subject = f"{fleet.name}/{name}: "
            lines = [
                line.split(subject)[1] for line in process.log().splitlines() if subject in line
            ]
            # On a busy machine a pod may change between too large and too slow; that is news each time.
            assert all(one != next_one for one, next_one in itertools.pairwise(lines)), lines
        assert process.end() == 0


def test_missing_rights_are_told_and_looked_for_again(fleet: FleetNamespace) -> None:
    pod = fleet.add()
    with exporter(fleet) as process:
        wait_until(
            lambda: process.value("vllm_spans_exporter_watch_failures_total", reason="forbidden"),
            "the failure is counted",
        )
        assert process.value("vllm_spans_exporter_watch_connected") == 0
        assert not process.answers("/readyz")
        assert "forbidden: pods is forbidden" in process.log()
        assert not pod.server.asked
        fleet.grant()
        process.wait_ready()
        wait_until(lambda: pod.server.asked, "the pod is asked")
        wait_until(
            lambda: process.value("vllm_spans_exporter_watch_connected") == 1, "the watch runs"
        )
        assert process.end() == 0


def test_rights_in_one_namespace_are_none_in_another(
    fleet: FleetNamespace, control_plane: ControlPlane
) -> None:
    fleet.grant()
    pod = fleet.add()
    with exporter(fleet, "--namespace", fleet.name, "--namespace", "kube-system") as process:
        wait_until(lambda: pod.server.asked, "the pod that may be seen is asked")
        wait_until(
            lambda: process.value("vllm_spans_exporter_watch_failures_total", reason="forbidden"),
            "the failure is counted",
        )
        assert not process.answers("/readyz"), "half a fleet looks like a whole one"


def test_an_api_server_that_is_gone_stops_no_scrape(
    fleet: FleetNamespace, control_plane: ControlPlane
) -> None:
    fleet.grant()
    pod = fleet.add()
    with exporter(fleet) as process:
        process.wait_ready()
        wait_until(
            lambda: process.value("vllm_spans_exporter_watch_connected") == 1, "the watch runs"
        )
        control_plane.stop_server()
        try:
            wait_until(
                lambda: process.value("vllm_spans_exporter_watch_connected") == 0, "it is noticed"
            )
            wait_until(
                lambda: process.value(
                    "vllm_spans_exporter_watch_failures_total", reason="unreachable"
                ),
                "it is counted",
            )
            assert "unreachable: " in process.log()
            asked = pod.server.asked
            wait_until(lambda: pod.server.asked > asked + 3, "the pods known last are asked")
            assert process.answers("/readyz")
        finally:
            control_plane.start_server()
        new = fleet.add()
        wait_until(lambda: new.server.asked, "a pod that came later is found", 90)
        assert process.end() == 0


def test_a_version_that_the_server_forgot_is_told_from_other_failures(
    fleet: FleetNamespace,
) -> None:
    from vllm_spans.exporter.kube import PodWatch, WatchError, client_maker
    from vllm_spans.exporter.pods import PortRule

    fleet.grant()
    make_client, namespace = client_maker(str(fleet.credentials), None)
    assert namespace == fleet.name
    counted: list[str] = []
    watch = PodWatch(make_client, namespace, "", PortRule(), counted.append, counted.append)
    with pytest.raises(WatchError, match="too old") as raised:
        watch._watch(make_client(), "1")
    assert raised.value.reason == "expired"
    assert counted == ["ERROR"]


def test_status_shows_the_pods_of_a_namespace(fleet: FleetNamespace) -> None:
    fleet.grant()
    for number in range(3):
        BusyPod(fleet, age=3600.0, requests=10 * number)
    command = [sys.executable, "-m", "vllm_spans.cli", "status", "--json"]
    command += ["--kubeconfig", str(fleet.credentials)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    model = json.loads(done.stdout)["models"]["tiny"]
    assert model["pods"]["ready"] == 3
    assert model["counters"]["requests"]["partial"] == 30
    assert model["reuse_ratio"] == REUSED


def test_status_says_that_the_rights_are_missing(fleet: FleetNamespace) -> None:
    command = [sys.executable, "-m", "vllm_spans.cli", "status"]
    command += ["--kubeconfig", str(fleet.credentials)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "forbidden" in done.stderr
    assert done.stderr.count("\n") == 1


def test_inside_a_pod_its_credentials_and_namespace_are_taken(
    fleet: FleetNamespace, tmp_path: Path
) -> None:
    """Those that a kubelet mounts into every pod, where nothing else is given."""
    fleet.grant()
    pod = fleet.add()
    given = json.loads(fleet.credentials.read_text(encoding="utf-8"))
    server = given["clusters"][0]["cluster"]
    (tmp_path / "token").write_text(given["users"][0]["user"]["token"], encoding="utf-8")
    (tmp_path / "namespace").write_text(fleet.name, encoding="utf-8")
    (tmp_path / "ca.crt").write_bytes(Path(server["certificate-authority"]).read_bytes())
    # A file system of the process's own, in which the path of a pod's credentials can be made.
    script = (
        "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io && "
        'ln -s "$0" /run/secrets/kubernetes.io/serviceaccount && exec "$@"'
    )
    address = urlsplit(server["server"])
    with ExporterProcess(
        *FLAGS,
        within=["unshare", "--mount", "sh", "-c", script, str(tmp_path)],
        environ={
            "KUBERNETES_SERVICE_HOST": str(address.hostname),
            "KUBERNETES_SERVICE_PORT": str(address.port),
        },
    ) as process:
        process.wait_ready()
        wait_until(lambda: pod.server.asked, "the pod is asked")
        assert process.end() == 0
