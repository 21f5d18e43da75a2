"""From the JSON of pods and of changes to them to targets. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_spans.exporter.targets import METRICS_PATH, Target

Json = Mapping[str, Any]
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PortRule:
    """Where in a pod the metrics are.

    Attributes:
        annotation: Name of an annotation that holds the port's number; it goes before all else.
        port_name: Name of a container's port; it goes before ``port``.
        port: Number of the port of pods that have neither.
        path: Path of the page.
    """

    annotation: str = "prometheus.io/port"
    port_name: str = "http"
    port: int = 8000
    path: str = METRICS_PATH


def target_of(pod: Json, rule: PortRule) -> Target | None:
    """Target of a pod.

    Args:
        pod: A pod as the API server writes it.
        rule: Where its metrics are.

    Returns:
        ``None`` for a pod that has ended.
    """
    meta, status = pod["metadata"], pod.get("status") or {}
    if status.get("phase") in _ENDED:
        return None
    container, port = _container_and_port(pod, rule)
    state = _container_status(status, container)
    address = status.get("podIP")
    if address and ":" in address:
        address = f"[{address}]"
    running = status.get("phase") == "Running"
    ready = running and "deletionTimestamp" not in meta and _is_ready(status)
    return Target(
        key=meta["uid"],
        name=f"{meta['namespace']}/{meta['name']}",
        url=f"http://{address}:{port}{rule.path}" if address and running else None,
        ready=ready,
        incarnation=f"{state.get('containerID', '')} {state.get('restartCount', 0)}",
        started=_started(state),
    )


@dataclass
class PodTable:
    """The pods of one list or watch.

    Attributes:
        rule: Where their metrics are.
        targets: Target by uid.
    """

    rule: PortRule
    targets: dict[str, Target] = field(default_factory=dict)

    def replace(self, pods: Iterable[Json]) -> None:
        """Take in a list of all pods."""
        found = (target_of(pod, self.rule) for pod in pods)
        self.targets = {target.key: target for target in found if target is not None}

    def change(self, kind: str, pod: Json) -> None:
        """Take in one change.

        Args:
            kind: ``ADDED``, ``MODIFIED`` or ``DELETED``.
            pod: The pod as it is now, or was last.
        """
        target = None if kind == "DELETED" else target_of(pod, self.rule)
        if target is None:
            self.targets.pop(pod["metadata"]["uid"], None)
        else:
            self.targets[target.key] = target


def _container_and_port(pod: Json, rule: PortRule) -> tuple[str | None, int]:
    """Name of the container that serves the metrics, where the port tells, and the port's number."""
    ports = [
        (container["name"], port)
        for container in (pod.get("spec") or {}).get("containers") or ()
        for port in container.get("ports") or ()
    ]
    number = rule.port
    text = (pod["metadata"].get("annotations") or {}).get(rule.annotation, "")
    named = [port["containerPort"] for _, port in ports if port.get("name") == rule.port_name]
    if text.isdecimal() and 0 < int(text) < 65536:
        number = int(text)
    elif named:
        number = named[0]
    owners = [name for name, port in ports if port.get("containerPort") == number]
    return (owners[0] if owners else None), number


def _container_status(status: Json, name: str | None) -> Json:
    found: list[Json] = status.get("containerStatuses") or []
    return next((state for state in found if state.get("name") == name), found[0] if found else {})


def _is_ready(status: Json) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )


def _started(state: Json) -> float | None:
    text = ((state.get("state") or {}).get("running") or {}).get("startedAt")
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
