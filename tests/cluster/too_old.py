"""What the chart can render that the node's server, 1.20, does not know: it is checked against schemas only."""

from __future__ import annotations

from tests.charts.rendering import PRESETS, render
from tests.cluster.release import Cluster

FOUND: list[str] = []
"""Lines for the end of the test run's output."""

OVERLAY = "kubernetes-1.20"
BUILT_IN = ("apps", "autoscaling", "batch", "policy")


def is_built_in(api_version: str) -> bool:
    """Whether a version of an API is Kubernetes' own, not that of somebody's custom resources."""
    group = api_version.rpartition("/")[0]
    own = group.endswith(".k8s.io") and not group.startswith(("inference.", "leaderworkerset."))
    return not group or group in BUILT_IN or own


def unknown_to(cluster: Cluster) -> dict[str, list[str]]:
    """``apiVersion Kind`` -> the presets that render it, of what the server does not know."""
    known = set(cluster.kubectl("api-versions").split())
    found: dict[str, list[str]] = {}
    for preset in PRESETS:
        name = preset.name.removesuffix("-values.yaml")
        if name == OVERLAY:
            continue
        for item in render(preset=preset).objects:
            if item["apiVersion"] not in known:
                presets = found.setdefault(f"{item['apiVersion']} {item['kind']}", [])
                if name not in presets:
                    presets.append(name)
    return found
