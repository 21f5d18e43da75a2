"""Prevents: a load that its own program refuses, that measures itself, or that an upgrade cannot change."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from loadtests import run_cli
from tests.charts.rendering import Render, refusal, render
from tests.charts.selecting import pod_labels


def load(**values: Any) -> dict[str, Any]:
    return {"loadtest": {"enabled": True, **values}}


def pod(rendered: Render) -> dict[str, Any]:
    return rendered.one("Job", "loadtest")["spec"]["template"]["spec"]


def arguments(rendered: Render) -> argparse.Namespace:
    """The command line as the program itself reads it."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    run_cli.add_commands(parser.add_subparsers(required=True))
    (container,) = pod(rendered)["containers"]
    assert container["command"] == ["tini", "--", "python", "-m", "loadtests"]
    return parser.parse_args(container["args"])


def job_name(values: dict[str, Any], helm: int, **more: Any) -> str:
    return str(render(values, helm=helm, **more).one("Job", "loadtest")["metadata"]["name"])


def test_it_loads_this_releases_service_and_waits_for_it(helm: int) -> None:
    rendered = render(load(), helm=helm)
    args = arguments(rendered)
    service = rendered.one("Service", "engine")
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    port = next(each for each in service["spec"]["ports"] if each["name"] == "http")
    assert args.url == f"http://{host}:{port['port']}"
    (container,) = pod(rendered)["containers"]
    assert (
        "--no-counters" in container["args"]
    )  # in full: the parser takes the beginning of a flag too
    assert args.wait == 1800 and not args.counted and not args.plain
    assert str(args.workload) == "/workload/workload.toml"
    assert (args.ttft, args.tpot, args.e2e, args.share) == (None, None, None, 0.99)


def test_the_program_takes_what_the_values_say(helm: int) -> None:
    values = load(
        url="https://gateway.test",
        model="smollm2",
        spans=False,
        slo={"ttft": 0.5, "tpot": 0.05, "e2e": 20, "share": 0.9},
        args=["--stall-limit", "30"],
        waitSeconds=0,
    )
    args = arguments(render(values, helm=helm))
    assert (args.url, args.model, args.plain, args.wait) == (
        "https://gateway.test",
        "smollm2",
        True,
        0,
    )
    assert (args.ttft, args.tpot, args.e2e, args.share) == (0.5, 0.05, 20, 0.9)
    assert args.stall_limit == 30


def test_one_server_is_reconciled_where_it_is_asked_for(helm: int) -> None:
    values = load(counters=True) | {"engine": {"replicas": 1}}
    assert arguments(render(values, helm=helm)).counted


def test_recorded_data_comes_from_a_claim(helm: int) -> None:
    values = load(workload="trace", data={"claim": "traces", "path": "mooncake/a.jsonl"})
    rendered = render(values, helm=helm)
    assert str(arguments(rendered).data) == "/data/mooncake/a.jsonl"
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pod(rendered)["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert claims == {"data": "traces"}


def test_reports_are_kept_in_a_claim_one_folder_for_each_pod(helm: int) -> None:
    rendered = render(load(results={"claim": "reports"}), helm=helm)
    assert str(arguments(rendered).out) == "/results/$(POD_NAME)"
    (results,) = [each for each in pod(rendered)["volumes"] if each["name"] == "results"]
    assert results["persistentVolumeClaim"] == {"claimName": "reports"}
    rendered = render(load(results={"size": "5Gi"}), helm=helm)
    (results,) = [each for each in pod(rendered)["volumes"] if each["name"] == "results"]
    assert results["emptyDir"] == {"sizeLimit": "5Gi"}


def test_the_servers_key_comes_from_a_secret(helm: int) -> None:
    rendered = render(load(apiKeySecret={"name": "keys", "key": "llm"}), helm=helm)
    environ = {each["name"]: each for each in pod(rendered)["containers"][0]["env"]}
    reference = environ["OPENAI_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "keys", "key": "llm"}
    rendered = render(load(), helm=helm)
    assert "OPENAI_API_KEY" not in str(pod(rendered))


def test_every_file_it_writes_has_a_place(helm: int) -> None:
    """The container's own files are read-only."""
    (container,) = pod(render(load(), helm=helm))["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert written == {"/results", "/tmp"}
    environ = {each["name"]: each.get("value", "") for each in container["env"]}
    assert environ["HOME"] == "/tmp" and environ["MPLCONFIGDIR"].startswith("/tmp/")


def test_a_changed_job_is_another_one_and_an_unchanged_one_the_same(helm: int) -> None:
    """A Job is immutable: under one name an upgrade that changes it would fail."""
    name = job_name(load(), helm)
    assert name == job_name(load(), helm, upgrade=True)
    others = [
        load(workers=2),
        load(workload="plain"),
        load(workloadText='kind = "plain"'),
        load(image={"tag": "next"}),
        load(resources={"limits": {"memory": "3Gi"}}),
    ]
    names = [name, *(job_name(values, helm) for values in others)]
    assert len(set(names)) == len(names)
    assert all(len(each) <= 63 for each in names)
    long = "a-long-name-of-a-release-that-is-nearly-too-long-1"
    assert len(job_name(load(), helm, release=long)) <= 63


def test_it_is_tried_once_and_ends(helm: int) -> None:
    rendered = render(load(deadlineSeconds=1000000, keepSeconds=2000000), helm=helm)
    job = rendered.one("Job", "loadtest")["spec"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert "activeDeadlineSeconds: 1000000\n" in rendered.text
    assert "ttlSecondsAfterFinished: 2000000\n" in rendered.text


def test_it_needs_no_rights_and_is_no_engine(helm: int) -> None:
    rendered = render(load(), helm=helm)
    assert pod(rendered)["automountServiceAccountToken"] is False
    (labels,) = pod_labels(rendered.one("Job", "loadtest"))
    assert labels["app.kubernetes.io/component"] == "loadtest"
    wanted = rendered.one("Service", "engine")["spec"]["selector"]
    assert not wanted.items() <= labels.items()


def test_none_without_being_asked_for(helm: int) -> None:
    assert not render(helm=helm).all("Job")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"workload": "shared"}, "there is no workload shared. Take one of agent, conversation"),
        ({"workload": "../secret"}, "workload"),
        ({"workload": "trace"}, "loadtest.data.claim is empty"),
        ({"workloadText": 'kind = "questions"'}, "loadtest.data.claim is empty"),
        ({"workload": "trace", "data": {"claim": "a"}}, "loadtest.data.path is empty"),
        ({"data": {"claim": "a", "path": "/etc"}}, "path"),
        ({"workers": 3}, "loadtest.workers is 3 and loadtest.resources.limits.cpu is 2"),
        ({"resources": {"limits": {"cpu": "500m"}}}, "limits.cpu is 500m"),
        ({"workers": 0}, "workers"),
        ({"url": "engine:8000"}, "url"),
        ({"slo": {"share": 2}}, "share"),
        ({"slo": {"ttft": "1s"}}, "ttft"),
        ({"slos": {}}, "slos"),
        ({"deadlineSeconds": 0}, "deadlineSeconds"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(load(**values), helm=helm)


@pytest.mark.parametrize(
    "more",
    [{"engine": {"replicas": 2}}, {"autoscaling": {"hpa": {"enabled": True}}}],
    ids=["replicas", "autoscaling"],
)
def test_counters_of_several_servers_are_refused(helm: int, more: dict[str, Any]) -> None:
    assert "Clear loadtest.counters" in refusal(load(counters=True) | more, helm=helm)
