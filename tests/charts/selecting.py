"""Label selectors, as Kubernetes reads their text."""

from __future__ import annotations

from typing import Any

from tests.charts.rendering import Render


def chosen_pods(rendered: Render, selector: str) -> list[tuple[str, dict[str, str]]]:
    """Kind of the owner and labels of the pods that a selector chooses.

    Args:
        rendered: Where the pods are.
        selector: Terms ``label=value``, all of which must hold.
    """
    wanted = dict(term.split("=") for term in selector.split(","))
    return [
        (thing["kind"], labels)
        for thing in rendered.objects
        for labels in pod_labels(thing)
        if wanted.items() <= labels.items()
    ]


def pod_labels(thing: dict[str, Any]) -> list[dict[str, str]]:
    """Labels of the pods that an object makes or is."""
    return [pod["metadata"]["labels"] for pod in _pods(thing)]


def pod_specs(thing: dict[str, Any]) -> list[dict[str, Any]]:
    """Specs of the pods that an object makes or is."""
    return [pod["spec"] for pod in _pods(thing)]


def _pods(thing: dict[str, Any]) -> list[dict[str, Any]]:
    if thing["kind"] == "Pod":
        return [thing]
    spec = thing.get("spec") or {}
    inner = spec.get("leaderWorkerTemplate", {})
    templates = [spec.get("template"), inner.get("leaderTemplate"), inner.get("workerTemplate")]
    return [each for each in templates if each and "metadata" in each]
