"""Prevents: a pod's address, state or restart being read wrongly from what Kubernetes says of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vllm_spans.exporter.pods import PodTable, PortRule, target_of

RULE = PortRule()
POD: dict[str, Any] = {
    "metadata": {"uid": "u1", "name": "engine-0", "namespace": "llm"},
    "spec": {
        "containers": [
            {"name": "proxy", "ports": [{"containerPort": 15000}]},
            {"name": "engine", "ports": [{"name": "http", "containerPort": 8080}]},
        ]
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {"name": "proxy", "containerID": "c://p", "restartCount": 9},
            {
                "name": "engine",
                "containerID": "c://e",
                "restartCount": 2,
                "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}},
            },
        ],
    },
}


def pod_with(**status: Any) -> dict[str, Any]:
    pod = copy.deepcopy(POD)
    pod["status"] |= status
    return pod


def test_the_container_that_serves_the_metrics_tells_of_restarts() -> None:
    target = target_of(POD, RULE)
    assert target is not None
    assert (target.key, target.name) == ("u1", "llm/engine-0")
    assert target.url == "http://10.0.0.7:8080/metrics"
    assert target.ready
    assert target.incarnation == "c://e 2"
    assert target.started == 1767323045.0


@pytest.mark.parametrize(
    ("annotation", "rule", "port"),
    [
        ("9100", RULE, 9100),
        ("0", RULE, 8080),
        ("many", RULE, 8080),
        ("70000", RULE, 8080),
        (None, RULE, 8080),
        (None, PortRule(port_name="metrics", port=8123), 8123),
        ("9100", PortRule(annotation="other"), 8080),
    ],
)
def test_where_the_port_comes_from(annotation: str | None, rule: PortRule, port: int) -> None:
    pod = copy.deepcopy(POD)
    if annotation is not None:
        pod["metadata"]["annotations"] = {"prometheus.io/port": annotation}
    target = target_of(pod, rule)
    assert target is not None
    assert target.url == f"http://10.0.0.7:{port}/metrics"


def test_pods_that_do_not_run_have_no_address_and_ended_ones_are_none() -> None:
    for status in ({"phase": "Pending"}, {"podIP": None}):
        target = target_of(pod_with(**status), RULE)
        assert target is not None
        assert target.url is None
    for phase in ("Succeeded", "Failed"):
        assert target_of(pod_with(phase=phase), RULE) is None
    bare = {"metadata": POD["metadata"]}
    target = target_of(bare, RULE)
    assert target is not None and not target.ready and target.url is None


def test_a_pod_that_ends_is_not_ready_but_still_asked() -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    target = target_of(pod, RULE)
    assert target is not None and not target.ready and target.url


def test_addresses_of_version_6_are_bracketed() -> None:
    target = target_of(pod_with(podIP="fd00::7"), RULE)
    assert target is not None
    assert target.url == "http://[fd00::7]:8080/metrics"


def test_a_table_follows_lists_and_changes() -> None:
    table = PodTable(RULE)
    table.replace([POD])
    other = copy.deepcopy(POD)
    other["metadata"] |= {"uid": "u2", "name": "engine-1"}
    table.change("ADDED", other)
    assert table.targets.keys() == {"u1", "u2"}
    table.change("MODIFIED", pod_with(phase="Failed"))
    assert table.targets.keys() == {"u2"}
    table.change("DELETED", other)
    table.change("DELETED", other)
    assert not table.targets
    table.replace([POD])
    table.replace([])
    assert not table.targets
