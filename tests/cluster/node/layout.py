"""Where the node's files lie, and its addresses. They are fixed: only one node runs on a machine at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "vllm-spans-node"
NODE_NAME = "node1"
ADDRESS = "10.97.0.1"
PODS = "10.244.0.0/24"
FIRST_SERVICE = "10.96.0.1"  # that of the API server
DOMAIN = "cluster.local"
API_PORT = 16443
ETCD_PORT = 12379
ETCD_PEER_PORT = 12380
REGISTRY = "localhost:5000"
PROMETHEUS = "http://127.0.0.1:19090"
PAUSE_IMAGE = "localhost/pause:3.2"
CGROUP = "vllm-spans-node"
# The kubelet knows no other place.
POD_LOGS = Path("/var/log/pods")
POD_LOG_LINKS = Path("/var/log/containers")


def default_root() -> Path:
    """Folder of the node, outside the checkout."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vllm_spans" / "node"


@dataclass(frozen=True)
class Folder:
    """Paths of the node's files.

    Attributes:
        root: Folder of all of them.
    """

    root: Path = field(default_factory=default_root)

    @property
    def logs(self) -> Path:
        """What the programs write; they stay after ``down``."""
        return self.root / "logs"

    @property
    def pids(self) -> Path:
        """A file for each running program."""
        return self.root / "pids"

    @property
    def keys(self) -> Path:
        """Keys and certificates."""
        return self.root / "keys"

    @property
    def socket(self) -> Path:
        """containerd's socket."""
        return self.root / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        """Credentials with all rights."""
        return self.credentials("admin")

    @property
    def service_names(self) -> Path:
        """Addresses and names of Services, for DNS."""
        return self.root / "service-names"

    @property
    def targets(self) -> Path:
        """Pods that Prometheus scrapes."""
        return self.root / "targets.json"

    def credentials(self, user: str) -> Path:
        """A user's kubeconfig."""
        return self.root / f"{user}.json"

    def data(self, name: str) -> Path:
        """A program's own folder, which ``down`` removes."""
        return self.root / "data" / name

    def config(self, name: str) -> Path:
        """A program's configuration file."""
        return self.root / "config" / name
