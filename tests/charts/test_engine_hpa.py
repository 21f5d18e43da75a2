"""Prevents: scaling on a metric that no engine has, or of a Deployment that is none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.metrics import exported
from tests.charts.rendering import refusal, render


def hpa(**values: Any) -> dict[str, Any]:
    return {"autoscaling": {"hpa": {"enabled": True, **values}}}


def test_it_scales_the_engines(helm: int) -> None:
    rendered = render(hpa(minReplicas=2, maxReplicas=5, target=2.5), helm=helm)
    spec = rendered.one("HorizontalPodAutoscaler")["spec"]
    engine = rendered.one("Deployment", "engine")
    assert spec["scaleTargetRef"] == {
        "apiVersion": engine["apiVersion"],
        "kind": "Deployment",
        "name": engine["metadata"]["name"],
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": "2.5"}


def test_the_metric_is_one_that_engines_have(helm: int) -> None:
    (metric,) = render(hpa(), helm=helm).one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in exported()


def test_an_engine_does_not_go_at_the_first_quiet_minute(helm: int) -> None:
    spec = render(hpa(scaleDownSeconds=900), helm=helm).one("HorizontalPodAutoscaler")["spec"]
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 900


def test_none_without_being_asked_for(helm: int) -> None:
    assert not render(helm=helm).all("HorizontalPodAutoscaler")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (hpa(minReplicas=5), "autoscaling.hpa.minReplicas (5) is more than maxReplicas (4)"),
        (hpa(maxReplicas=0), "maxReplicas"),
        (hpa(target=0), "target"),
        (hpa(scaleDownSeconds=7200), "scaleDownSeconds"),
        (hpa(metrics=[]), "metrics"),
        (
            {"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}},
            "clear autoscaling.hpa.enabled",
        ),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, helm=helm)
