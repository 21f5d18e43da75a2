"""What a NetworkPolicy lets through, as Kubernetes reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Peer = tuple[str, dict[str, str]]
"""Namespace, and labels of a pod; no labels for what is no pod of the cluster."""


def allows(
    policy: dict[str, Any], direction: str, peer: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a policy's own pods may talk with a peer.

    Args:
        policy: The NetworkPolicy. Selectors of namespaces are taken to choose all.
        direction: ``ingress`` or ``egress``.
        peer: The other side.
        port: Number of the side that listens.
        protocol: ``TCP`` or ``UDP``.
    """
    if direction.capitalize() not in policy["spec"]["policyTypes"]:
        return True
    rules: Iterable[dict[str, Any]] = policy["spec"].get(direction) or ()
    side = "from" if direction == "ingress" else "to"
    own = policy["metadata"]["namespace"]
    return any(
        _has_port(rule.get("ports"), port, protocol) and _has_peer(rule.get(side), peer, own)
        for rule in rules
    )


def _has_port(ports: list[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    if not ports:
        return True
    return any((each["port"], each["protocol"]) == (port, protocol) for each in ports)


def _has_peer(peers: list[dict[str, Any]] | None, peer: Peer, own: str) -> bool:
    if not peers:
        return True
    namespace, labels = peer
    for each in peers:
        if not labels or "ipBlock" in each:
            continue
        selector = each.get("podSelector", {}).get("matchLabels", {})
        anywhere = "namespaceSelector" in each
        if (anywhere or namespace == own) and selector.items() <= labels.items():
            return True
    return False
