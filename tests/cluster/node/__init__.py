"""A whole Kubernetes node on this machine, in a network namespace of its own: ``python -m tests.cluster.node up``.

etcd, the five programs of Kubernetes, containerd, a registry at ``localhost:5000``, DNS and Prometheus run as plain
processes; their data, process ids and logs lie in one folder, and ``down`` ends them by those ids and leaves nothing
but the logs. Nothing leaves the namespace, since it has no route out, and nothing outside it can be reached from pods.
"""

from tests.cluster.node.layout import NODE_NAME, PROMETHEUS, REGISTRY, Folder
from tests.cluster.node.lifecycle import NodeError, down, leftovers, status, up
from tests.cluster.node.network import inside, within

__all__ = [
    "NODE_NAME",
    "PROMETHEUS",
    "REGISTRY",
    "Folder",
    "NodeError",
    "down",
    "inside",
    "leftovers",
    "status",
    "up",
    "within",
]
