"""Prevents: a large number of a values file that reaches Kubernetes as 1e+06, or a quantity that is no text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.charts.rendering import refusal, render

MILLION = 1_000_000
SIZE = 8_589_934_592
RESOURCES = {"requests": {"cpu": 2, "memory": SIZE}, "limits": {"cpu": 2, "memory": SIZE}}
EPP = {"image": {"repository": "epp", "tag": "1"}, "resources": RESOURCES}
SHARED = {"enabled": True, "size": SIZE * 4, "limit": SIZE}
_POWER = re.compile(r"^.*\de\+\d.*$", re.M)


def quantities(thing: Any) -> Iterator[Any]:
    """Values of all requests, limits and size limits below."""
    if isinstance(thing, dict):
        for name, each in thing.items():
            if name in ("requests", "limits") and isinstance(each, dict):
                yield from each.values()
            elif name == "sizeLimit":
                yield each
            else:
                yield from quantities(each)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from quantities(each)


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"shm": {"size": SIZE}, "resources": RESOURCES}},
        {"offload": {"shared": SHARED}, "model": {"cache": {"enabled": True, "size": SIZE}}},
        {"autoscaling": {"hpa": {"enabled": True, "target": MILLION, "maxReplicas": MILLION}}},
        {"autoscaling": {"keda": {"enabled": True, "prometheus": "http://p", "target": MILLION}}},
        {"autoscaling": {"keda": {"enabled": True, "prometheus": "http://p", "target": 0.5}}},
        {"pdb": {"maxUnavailable": MILLION}},
        {"engine": {"rollout": {"maxSurge": MILLION, "maxUnavailable": "25%"}}},
        {"engine": {"fsGroup": 1_000_660_000, "probes": {"livenessFailures": MILLION}}},
        {"model": {"maxLength": MILLION}, "spans": {"gapLength": MILLION, "maxSpans": MILLION}},
        {"loadtest": {"enabled": True, "resources": RESOURCES, "results": {"size": SIZE}}},
        {"exporter": {"resources": RESOURCES}, "test": {"resources": RESOURCES}},
        {"inferencePool": {"enabled": True, "endpointPicker": EPP}},
    ],
    ids=lambda values: "+".join(values),
)
def test_numbers_arrive_as_they_were_written(helm: int, values: dict[str, Any]) -> None:
    rendered = render(values, helm=helm)
    assert _POWER.findall(rendered.text) == []
    found = list(quantities(rendered.objects))
    assert found and all(isinstance(each, str) for each in found), found


def test_fractions_stay_fractions(helm: int) -> None:
    keda = {"enabled": True, "prometheus": "http://p", "target": 0.5}
    (trigger,) = render({"autoscaling": {"keda": keda}}, helm=helm).one("ScaledObject")["spec"][
        "triggers"
    ]
    assert trigger["metadata"]["threshold"] == "0.5"


@pytest.mark.parametrize(
    "values",
    [
        {"pdb": {"maxUnavailable": 1.5}},
        {"engine": {"replicas": 1.5}},
        {"engine": {"shm": {"size": -1}}},
        {"engine": {"resources": {"limits": {"memory": "8 GB"}}}},
    ],
)
def test_what_is_no_number_of_such_things_is_refused(helm: int, values: dict[str, Any]) -> None:
    assert "schema" in refusal(values, helm=helm)
