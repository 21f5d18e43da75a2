"""Prevents: a chart that renders and does not run. One release of it, from the first installation to the last object,
on a real Kubernetes with the real engine and the real small model.

The tests are one story and run in this order; each leaves two ready engines to the next.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.__main__ import QUESTION, load_documents
from tests.charts.rendering import CHART
from tests.cluster import too_old
from tests.cluster.clients import GAP, MODEL, Ledger, Library, Load, ask, counted
from tests.cluster.node import NODE_NAME, Folder
from tests.cluster.release import (
    Cluster,
    CommandError,
    Object,
    Release,
    is_ready,
    name_of,
    pod_url,
    query,
    total,
)
from tests.exporter.engines import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME = "vllm-spans"
NAMESPACE = "llm"
VOLUME = "shared-kv"
VALUES = Path(__file__).with_name("e2e-values.yaml")
PRESET_FILES = [CHART / "ci" / f"{name}-values.yaml" for name in ("cpu-demo", "kubernetes-1.20")]
FLEET = "vllm_spans_fleet_{}_total"
SETTLED_SECONDS = 10.0
"""Within these seconds after an engine's death nobody is sent to it any more."""


def values(*files: Path) -> list[str]:
    return [argument for file in files for argument in ("--values", str(file))]


def reused(url: str, tier: str) -> float:
    """Span tokens that an engine took from a tier."""
    return counted(url, "vllm_spans_reused_tokens_total", tier=tier)


@pytest.fixture(scope="module")
def untouched(cluster: Cluster) -> set[str]:
    """What is in the namespace before anything is installed."""
    # A run that was broken off may have left it, on a node that was up before.
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "persistentvolume", VOLUME, "--ignore-not-found")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    account = ("get", "serviceaccount", "default", "--namespace", NAMESPACE)

    def is_there() -> bool:
        try:
            return bool(cluster.kubectl(*account))
        except CommandError:
            return False

    wait_until(is_there, "the namespace has its account")
    return contents(cluster)


def contents(cluster: Cluster) -> set[str]:
    """``kind/name`` of everything in the namespace that somebody made, and of what belongs to no namespace."""
    passing = {"events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io"}
    found: set[str] = set()
    for namespaced in ("true", "false"):
        command = ["api-resources", "--verbs=list", f"--namespaced={namespaced}", "-o", "name"]
        kinds = set(cluster.kubectl(*command).split()) - passing
        # Of what is namespaced the access reviews and component states are not objects.
        kinds -= {"componentstatuses", "nodes"}
        scope = ["--namespace", NAMESPACE] if namespaced == "true" else []
        found |= set(cluster.kubectl("get", ",".join(sorted(kinds)), *scope, "-o", "name").split())
    return found


@pytest.fixture(scope="module")
def shared_volume(cluster: Cluster, node: Folder, untouched: set[str]) -> Iterator[Path]:
    """A volume that several pods may write: a folder of this machine."""
    path = node.data(VOLUME)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    path.chmod(0o777)  # a pod's group owns volumes, but not those of the host's own file system
    volume: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": VOLUME},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "shared",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path)},
        },
    }
    cluster.apply(volume)
    yield path
    cluster.kubectl("delete", "persistentvolume", VOLUME, "--wait=false")


@pytest.fixture(scope="module")
def release(
    cluster: Cluster, chart: list[str], inside: None, shared_volume: Path
) -> Iterator[Release]:
    """The release, brought up by one ``helm install --wait``."""
    installed = Release(cluster, NAME, NAMESPACE)
    begin = time.monotonic()
    try:
        try:
            installed.install(*chart, *values(*PRESET_FILES, VALUES))
        except CommandError as error:
            raise AssertionError(f"{error}\n{installed.diagnosis()}") from error
        print(f"[cluster] helm install --wait: {time.monotonic() - begin:.0f} s", flush=True)
        yield installed
    finally:
        if cluster.helm("list", "--short", "--namespace", NAMESPACE).strip():
            print(installed.diagnosis(), flush=True)
            installed.helm("uninstall", NAME, "--wait", "--timeout", "60s")


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    """What the clients have asked of the engines so far."""
    return Ledger()


@pytest.fixture(scope="module")
def library() -> Library:
    """Documents that all tests ask about."""
    return Library(seed=11)


def test_one_installation_brings_up_two_engines_and_the_exporter(release: Release) -> None:
    pods = release.ready_pods(2)
    release.ready_pods(1, "exporter")
    for pod in pods:
        models = httpx.get(f"{pod_url(pod)}/v1/models", timeout=30).json()["data"]
        assert [model["id"] for model in models] == [MODEL]
        assert counted(pod_url(pod), "vllm_spans_build_info") == 1
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        assert not pod["spec"].get("enableServiceLinks", True), (
            "links of a Service named vllm would set VLLM_PORT"
        )
    assert release.helm("status", NAME, "--output", "json")


def test_no_pod_runs_as_root_or_may_more_than_it_must(release: Release) -> None:
    for component in ("engine", "exporter"):
        for pod in release.pods(component):
            output = release.kubectl("exec", name_of(pod), "--", "cat", "/proc/self/status")
            status = dict(line.split(":", 1) for line in output.splitlines() if ":" in line)
            assert status["Uid"].split()[0] != "0", component
            assert int(status["CapEff"], 16) == 0, component
            assert status["NoNewPrivs"].strip() == "1", component
    for account, verb, resource, wanted in (
        ("exporter", "list", "pods", "yes"),
        ("exporter", "watch", "pods", "yes"),
        ("exporter", "get", "secrets", "no"),
        ("exporter", "delete", "pods", "no"),
        ("engine", "list", "pods", "no"),
    ):
        (pod, *_) = release.pods(account)
        user = f"system:serviceaccount:{NAMESPACE}:{pod['spec']['serviceAccountName']}"
        try:
            answer = release.kubectl("auth", "can-i", verb, resource, "--as", user)
        except CommandError as error:  # "no" is a failure
            answer = str(error)
        assert wanted in answer.split(), (account, verb, resource)


def test_spans_that_one_engine_wrote_are_reused_by_the_other(
    release: Release, library: Library, ledger: Ledger, shared_volume: Path
) -> None:
    first, second = map(pod_url, release.ready_pods(2))
    shown = len(library.documents)
    case = library.case(shown)
    ledger.add(case, ask(first, case))
    body_blocks = sum((len(body) - GAP) // 32 for body in case.bodies)
    wait_until(
        lambda: len(list(shared_volume.rglob("*.kv"))) >= body_blocks, "the first has written files"
    )
    before = reused(second, "file")
    case = library.case(shown)
    answer = ask(second, case)
    ledger.add(case, answer)
    assert answer.cached_tokens == body_blocks * 32
    wait_until(
        lambda: reused(second, "file") - before == answer.cached_tokens,
        "the second counts them",
        15,
    )


def test_the_fleets_ratio_in_prometheus_is_what_the_clients_count(
    release: Release, library: Library, ledger: Ledger
) -> None:
    for number in range(8):
        case = library.case()
        ledger.add(case, ask(release.url(), case, stream=number % 2 == 1))
    wanted = {
        "requests": ledger.requests,
        "lookup_tokens": ledger.lookup,
        "gap_tokens": ledger.gap,
        "reused_tokens": ledger.reused,
    }

    def arrived() -> dict[str, float]:
        return {name: total(FLEET.format(name)) for name in wanted}

    with contextlib.suppress(AssertionError):
        wait_until(lambda: arrived() == wanted, "Prometheus has what the clients count")
    assert arrived() == wanted
    (ratio,) = query(f'vllm_spans_fleet_gap_recompute_ratio{{model="{MODEL}"}}').values()
    assert ratio == pytest.approx(ledger.gap / ledger.reused)
    (pods,) = query(f'vllm_spans_fleet_pods{{model="{MODEL}", state="ready"}}').values()
    assert pods == 2
    engines = query("sum by (pod) (vllm_spans_requests_total)")
    assert len(engines) == 2, "the Service sent everything to one engine"


def test_documents_in_chats_through_the_service(release: Release) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{release.url()}/v1", api_key="none", max_retries=0, timeout=120)
    documents = [{"title": d.title, "text": d.text} for d in load_documents()[:2]]
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, extra_body={"documents": documents})
    assert whole.choices[0].message.content
    assert whole.usage is not None
    usage = whole.usage.model_dump()
    assert usage["span_pad_tokens"] > 0
    streamed = client.chat.completions.create(
        **asked, stream=True, extra_body={"documents": documents[::-1]}
    )
    text = "".join(event.choices[0].delta.content or "" for event in streamed if event.choices)
    assert text
    with pytest.raises(Exception, match="legolinc"):
        client.chat.completions.create(
            **asked, extra_body={"documents": documents, "spans": {"gap_policy": "legolinc"}}
        )


def test_helm_test_passes(release: Release) -> None:
    output = release.helm("test", NAME, "--timeout", "120s")
    assert "Succeeded" in output


def test_network_policies_choose_the_pods_and_open_their_ports(release: Release) -> None:
    """That they are enforced cannot be seen here: the node's network knows no policies."""
    policies = release.find("networkpolicies")
    assert policies
    chosen: dict[str, list[Object]] = {}
    for policy in policies:
        labels = policy["spec"]["podSelector"]["matchLabels"]
        for component in ("engine", "exporter"):
            for pod in release.pods(component):
                if labels.items() <= pod["metadata"]["labels"].items():
                    chosen.setdefault(component, []).append(policy)
                    break
    assert "engine" in chosen
    for component, named in (("engine", {"http", 8000}), ("exporter", {"metrics", 9405})):
        ports = {
            port["port"]
            for policy in chosen.get(component, [])
            for rule in policy["spec"].get("ingress", [])
            for port in rule.get("ports", [])
        }
        assert not chosen.get(component) or ports & named, component
    too_old.FOUND.append(
        "enforcement of networking.k8s.io/v1 NetworkPolicy: the node's network has none"
    )


def test_what_this_server_is_too_old_for_is_not_installed_here_and_said(
    release: Release, cluster: Cluster
) -> None:
    unknown = too_old.unknown_to(cluster)
    for kind, presets in unknown.items():
        theirs = "" if too_old.is_built_in(kind.split()[0]) else ", a custom resource"
        too_old.FOUND.append(f"{kind}{theirs} (presets {', '.join(presets)})")
    assert any(kind.startswith("policy/v1 ") for kind in unknown), "the overlay is needed no more"


def test_gpus_that_are_not_there_are_explained(
    release: Release, cluster: Cluster, chart: list[str]
) -> None:
    patch = '[{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "1"}]'
    cluster.kubectl("patch", "node", NODE_NAME, "--subresource=status", "--type=json", "-p", patch)
    wait_until(
        lambda: (
            cluster.get("node", NODE_NAME)["status"]["allocatable"].get("nvidia.com/gpu") == "1"
        ),
        "the node has a GPU, as far as Kubernetes knows",
    )
    other = Release(cluster, "big", NAMESPACE)
    presets = [CHART / "ci" / f"{name}-values.yaml" for name in ("multi-gpu", "kubernetes-1.20")]
    small = ["--set", "model.cache.enabled=false"]  # a claim that nobody serves would be told first
    notes = other.helm("install", other.name, *chart, *values(*presets), *small)
    try:
        pods: list[Object] = wait_until(lambda: other.find("pods", "engine"), "its pod is made")

        def events() -> str:
            field = f"involvedObject.name={name_of(pods[0])}"
            found: str = other.kubectl("get", "events", "--field-selector", field)
            return found

        wait_until(lambda: "Insufficient nvidia.com/gpu" in events(), "the scheduler says why")
        assert "kubectl" in notes
        assert "Pending" in notes, "the notes do not say what a pod that stays Pending means"
        assert "nvidia.com/gpu" in notes
    finally:
        other.helm("uninstall", other.name, "--wait", "--timeout", "60s")
        for claim in other.find("persistentvolumeclaims"):
            other.kubectl("delete", "persistentvolumeclaim", name_of(claim))


def test_a_rolling_upgrade_under_load_fails_no_request(release: Release, library: Library) -> None:
    before = {name_of(pod) for pod in release.ready_pods(2)}
    begin = time.monotonic()
    with Load(release.url(), library) as load:
        wait_until(lambda: load.count > 2, "the load runs")
        try:
            release.upgrade("--set", "engine.podAnnotations.upgrade=first")
        except CommandError as error:
            raise AssertionError(f"{error}\n{release.diagnosis()}") from error
        after = release.ready_pods(2)
        answered = load.count
        wait_until(lambda: load.count > answered + 4, "the new engines answer")
    print(f"[cluster] upgrade: {time.monotonic() - begin:.0f} s, {load.count} requests", flush=True)
    assert not load.failures
    assert not before & {name_of(pod) for pod in after}
    assert sum(reused(pod_url(pod), "file") for pod in after), "what the old ones wrote is lost"


def test_a_killed_engine_costs_few_requests_and_reuses_what_it_wrote(
    release: Release, library: Library, node: Folder
) -> None:
    victim, _ = release.ready_pods(2)
    status = victim["status"]["containerStatuses"][0]
    container = status["containerID"].removeprefix("containerd://")
    kill = ["ctr", "--address", str(node.socket), "--namespace", "k8s.io", "tasks", "kill"]
    with Load(release.url(), library, users=3) as load:
        wait_until(lambda: load.count > 3, "the load runs")
        assert not load.failures
        killed = time.monotonic()
        subprocess.run([*kill, "--all", "--signal", "SIGKILL", container], check=True)
        wait_until(
            lambda: (
                not is_ready(release.cluster.get("pod", name_of(victim), "--namespace", NAMESPACE))
            ),
            "its death is seen",
        )
        (restarted,) = [p for p in release.ready_pods(2) if name_of(p) == name_of(victim)]
        answered = load.count
        wait_until(lambda: load.count > answered + 4, "the load goes on")
    late = [a for a in load.answers if a.error and a.ended > killed + SETTLED_SECONDS]
    print(f"[cluster] killed: {len(load.failures)} of {load.count} requests failed", flush=True)
    assert not late, late
    assert len(load.failures) < load.count / 3, load.failures
    assert restarted["status"]["containerStatuses"][0]["restartCount"] == status["restartCount"] + 1
    before = reused(pod_url(restarted), "file")
    answer = ask(pod_url(restarted), library.case(len(library.documents)))
    assert not answer.error
    assert answer.cached_tokens
    assert reused(pod_url(restarted), "file") > 0, f"nothing came from the volume, {before} before"


def test_an_upgrade_that_cannot_start_harms_nobody_and_is_rolled_back(
    release: Release, library: Library
) -> None:
    before = {pod["metadata"]["uid"] for pod in release.ready_pods(2)}
    revision = release.revision()
    with Load(release.url(), library) as load:
        wait_until(lambda: load.count > 2, "the load runs")
        with pytest.raises(CommandError):
            release.upgrade("--set", "image.tag=never-built", timeout="15s")
        assert {pod["metadata"]["uid"] for pod in release.pods() if is_ready(pod)} == before
        release.helm("rollback", NAME, str(revision), "--wait", "--timeout", "60s")
        after = {pod["metadata"]["uid"] for pod in release.ready_pods(2)}
    assert after == before, "engines that did well were replaced"
    assert not load.failures
    assert release.revision() == revision + 2


def test_scaling_to_three_and_back_drains_the_one_that_goes(
    release: Release, library: Library
) -> None:
    release.upgrade("--set", "engine.podAnnotations.upgrade=first", "--set", "engine.replicas=3")
    pods = release.ready_pods(3)
    grace = pods[0]["spec"]["terminationGracePeriodSeconds"]
    answers: dict[str, Any] = {}

    def talk(pod: Object) -> None:
        answers[name_of(pod)] = ask(pod_url(pod), library.case(), stream=True, max_tokens=200)

    threads = [threading.Thread(target=talk, args=(pod,), daemon=True) for pod in pods]
    for thread in threads:
        thread.start()
    for pod in pods:
        wait_until(partial(is_busy, pod_url(pod)), "a long answer is on its way in every engine")
    with Load(release.url(), library) as load:
        begin = time.monotonic()
        release.upgrade(
            "--set", "engine.podAnnotations.upgrade=first", "--set", "engine.replicas=2"
        )
        left = release.ready_pods(2, seconds=grace + 10)
        seconds = time.monotonic() - begin
    for thread in threads:
        thread.join(180)
    (gone,) = {name_of(pod) for pod in pods} - {name_of(pod) for pod in left}
    print(f"[cluster] {gone} was gone after {seconds:.0f} s of {grace}", flush=True)
    assert not answers[gone].error, answers[gone]
    assert answers[gone].usage["completion_tokens"] == 200
    assert all(not answer.error for answer in answers.values()), answers
    assert not load.failures


def is_busy(url: str) -> bool:
    """Whether an engine has a request that runs."""
    return counted(url, "vllm:num_requests_running") > 0


def test_what_is_uninstalled_leaves_only_the_claim_that_it_says_it_keeps(
    release: Release, cluster: Cluster, untouched: set[str]
) -> None:
    output = release.helm("uninstall", NAME, "--wait", "--timeout", "120s")
    wait_until(lambda: not release.find("pods"), "the pods are gone")
    left = {
        item
        for item in contents(cluster) - untouched
        if not item.startswith("persistentvolume/")  # the tests' own
    }
    assert len(left) == 1, left
    (claim,) = left
    assert claim.startswith("persistentvolumeclaim/")
    assert claim.partition("/")[2] in output, "Helm did not say what it keeps"
    cluster.kubectl("delete", claim, "--namespace", NAMESPACE)
