"""The programs' configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.node.layout import ADDRESS, CGROUP, DOMAIN, PAUSE_IMAGE, PODS, REGISTRY, Folder

RULES = Path(__file__).resolve().parents[3] / "monitoring" / "rules"


def write_all(folder: Folder) -> None:
    """Write them anew."""
    folder.config("").mkdir(parents=True, exist_ok=True)
    (folder.config("cni")).mkdir(exist_ok=True)
    folder.config("containerd.toml").write_text(_containerd(folder))
    _write(folder.config("cni") / "10-bridge.conflist", _pod_network(folder))
    _write(folder.config("kubelet.yaml"), _kubelet(folder))
    _write(folder.config("registry.yaml"), _registry(folder))
    _write(folder.config("prometheus.yaml"), _prometheus(folder))


def _write(path: Path, content: dict[str, Any]) -> None:
    # JSON is YAML too.
    text = json.dumps(content) if path.suffix == ".conflist" else yaml.safe_dump(content)
    path.write_text(text, encoding="utf-8")


def _containerd(folder: Folder) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""
version = 2
root = "{folder.data("containerd")}"
state = "{folder.data("containerd-state")}"
oom_score = 0
[grpc]
  address = "{folder.socket}"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  # A container may have no right to lower its score; runc fails then.
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  netns_mounts_under_state_dir = true
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    discard_unpacked_layers = true
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder.config("cni")}"
"""


def _pod_network(folder: Folder) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": PODS}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder.data("pod-addresses")),
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def _kubelet(folder: Folder) -> dict[str, Any]:
    authority = str(folder.keys / "ca.crt")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "port": 10250,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "x509": {"clientCAFile": authority},
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
        },
        # Only who is in the namespace can reach it.
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "clusterDNS": [ADDRESS],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        "volumePluginDir": str(folder.data("volume-plugins")),
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "5s",
        "oomScoreAdj": 0,
    }


def _registry(folder: Folder) -> dict[str, Any]:
    return {
        "version": 0.1,
        "log": {"accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(folder.data("registry"))},
            "delete": {"enabled": True},
        },
        "http": {"addr": REGISTRY.replace("localhost", "127.0.0.1")},
    }


def _prometheus(folder: Folder) -> dict[str, Any]:
    # Debian's Prometheus has no Kubernetes discovery; `discovery` writes the pods into a file.
    pods = {"job_name": "pods", "file_sd_configs": [{"files": [str(folder.targets)]}]}
    return {
        "global": {"scrape_interval": "2s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES / "*.yaml")],
        "scrape_configs": [pods],
    }
