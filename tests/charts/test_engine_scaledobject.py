"""Prevents: KEDA that asks for a metric no engine has, for another release's, or for nothing that Prometheus parses."""

from __future__ import annotations

import re
from typing import Any

import promql_parser
import pytest

from tests.charts.metrics import exported
from tests.charts.rendering import NAMESPACE, refusal, render


def keda(**values: Any) -> dict[str, Any]:
    return {
        "autoscaling": {"keda": {"enabled": True, "prometheus": "http://prom.test:9090", **values}}
    }


def trigger(helm: int, **values: Any) -> dict[str, Any]:
    (found,) = render(keda(**values), helm=helm).one("ScaledObject")["spec"]["triggers"]
    return found["metadata"]


def test_it_scales_the_engines(helm: int) -> None:
    rendered = render(keda(minReplicas=0, maxReplicas=9, scaleDownSeconds=60), helm=helm)
    spec = rendered.one("ScaledObject")["spec"]
    engine = rendered.one("Deployment", "engine")["metadata"]["name"]
    assert spec["scaleTargetRef"] == {"name": engine}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == (0, 9, 60)
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"


def test_the_query_is_over_metrics_that_engines_have(helm: int) -> None:
    query = trigger(helm)["query"]
    promql_parser.parse(query)
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', query)
    found = {name for name in exported() if re.fullmatch(pattern, name)}
    wanted = {"num_requests_running", "num_requests_waiting"}
    assert found == {f"vllm{mark}{name}" for mark in ":_" for name in wanted}


def test_the_query_is_of_this_releases_pods(helm: int) -> None:
    query = trigger(helm)["query"]
    assert f'namespace="{NAMESPACE}"' in query
    (pattern,) = re.findall(r'pod=~"([^"]+)"', query)
    assert re.fullmatch(pattern, "demo-vllm-spans-7d9c5b8f6-x2x4z")
    assert not re.fullmatch(pattern, "other-vllm-spans-7d9c5b8f6-x2x4z")


def test_query_and_target_are_those_of_the_values(helm: int) -> None:
    found = trigger(helm, query="sum(up)", target=2.5)
    assert found == {
        "serverAddress": "http://prom.test:9090",
        "query": "sum(up)",
        "threshold": "2.5",
    }


def test_none_without_being_asked_for(helm: int) -> None:
    assert not render(helm=helm).all("ScaledObject")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (keda(prometheus=""), "autoscaling.keda.prometheus is empty"),
        (keda(prometheus="prom:9090"), "prometheus"),
        (keda(minReplicas=9), "autoscaling.keda.minReplicas (9) is more than maxReplicas (4)"),
        (keda(target="many"), "target"),
        (keda(threshold=1), "threshold"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, helm=helm)
