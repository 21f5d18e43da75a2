"""Prevents: engines over several nodes whose pods do not find each other, or whose workers get requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.engine import flags
from tests.charts.rendering import refusal, render


def templates(helm: int, **engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Templates of the leader and of the workers."""
    rendered = render({"engine": engine}, preset="multi-node", helm=helm)
    inner = rendered.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return inner["leaderTemplate"], inner["workerTemplate"]


def test_one_group_is_one_engine_and_falls_as_one(helm: int) -> None:
    rendered = render({"engine": {"replicas": 3}}, preset="multi-node", helm=helm)
    spec = rendered.one("LeaderWorkerSet")["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert not rendered.all("Deployment", "engine")


def test_leader_and_workers_find_each_other(helm: int) -> None:
    leader, worker = (each["spec"]["containers"][0]["args"] for each in templates(helm))
    for args in (leader, worker):
        assert flags(args)["master-addr"] == "$(LWS_LEADER_ADDRESS)"
        assert flags(args)["node-rank"] == "$(LWS_WORKER_INDEX)"
        assert (flags(args)["nnodes"], flags(args)["tensor-parallel-size"]) == ("2", "16")
    assert "headless" in flags(worker) and "headless" not in flags(leader)


def test_only_the_leader_serves(helm: int) -> None:
    leader, worker = templates(helm)
    rendered = render(preset="multi-node", helm=helm)
    wanted = rendered.one("Service", "engine")["spec"]["selector"].items()
    assert wanted <= leader["metadata"]["labels"].items()
    assert not wanted <= worker["metadata"]["labels"].items()
    inside = worker["spec"]["containers"][0]
    assert not inside.keys() & {"ports", "readinessProbe", "livenessProbe", "startupProbe"}


def test_workers_have_what_the_leader_has(helm: int) -> None:
    leader, worker = (each["spec"]["containers"][0] for each in templates(helm))
    for name in ("image", "env", "resources", "volumeMounts", "securityContext", "command"):
        assert leader[name] == worker[name]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"engine": {"nodes": 1, "tensorParallelSize": 8}}, "Set engine.nodes to 2 or more"),
        ({"engine": {"tensorParallelSize": 8}}, "engine.tensorParallelSize is 8 and there are 16"),
        (
            {"autoscaling": {"hpa": {"enabled": True}}},
            "autoscaling.hpa scales Deployments, and engine.kind is LeaderWorkerSet",
        ),
        (
            {"autoscaling": {"keda": {"enabled": True, "prometheus": "http://p"}}},
            "autoscaling.keda scales Deployments",
        ),
        ({"engine": {"kind": "StatefulSet"}}, "kind"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, preset="multi-node", helm=helm)


def test_none_for_engines_of_one_node(helm: int) -> None:
    assert not render(helm=helm).all("LeaderWorkerSet")
