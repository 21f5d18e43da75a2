"""Pods in a real API server whose addresses are those of small servers on this machine: no kubelet runs them."""

from __future__ import annotations

import datetime
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.control_plane import ControlPlane
from tests.engine.harness import ROOT
from tests.exporter.engines import EnginePod, EnginePods, engine_page

LABELS = {"app.kubernetes.io/name": "vllm-spans"}
MANIFEST = Path(ROOT) / "docs" / "exporter.md"


@dataclass
class ClusterPod:
    """A pod and the server at its address."""

    name: str
    server: EnginePod


class FleetNamespace:
    """A namespace of engine pods.

    Args:
        control_plane: The API server.
        name: The namespace's name.
        servers: Where the servers run.
    """

    def __init__(self, control_plane: ControlPlane, name: str, servers: EnginePods) -> None:
        self._control_plane = control_plane
        self._servers = servers
        self._made = 0
        self.name = name
        self.api.create_namespace({"metadata": {"name": name}})
        self.credentials = control_plane.service_account("spans-exporter", name)

    @property
    def api(self) -> Any:
        """A client with all rights."""
        return self._control_plane.api

    def grant(self) -> None:
        """Give the exporter's service account the rights that its documentation names."""
        from kubernetes import client

        rbac = client.RbacAuthorizationV1Api(self._control_plane.client)
        block = re.search(r"```yaml\n(.*?)```", MANIFEST.read_text(encoding="utf-8"), re.DOTALL)
        assert block is not None, "the documentation names no rights"
        for wanted in yaml.safe_load_all(
            block[1].replace("namespace: llm", f"namespace: {self.name}")
        ):
            if wanted["kind"] == "Role":
                rbac.create_namespaced_role(self.name, wanted)
            elif wanted["kind"] == "RoleBinding":
                rbac.create_namespaced_role_binding(self.name, wanted)

    def add(
        self, page: str | None = None, *, ready: bool = True, named_port: bool = False
    ) -> ClusterPod:
        """Create a pod that runs.

        Args:
            page: What its server answers; an idle engine that has just started, without it.
            ready: Whether it is ready.
            named_port: Tell its port by the container's named port, not by annotation.
        """
        self._made += 1
        host = f"127.0.{self._made // 250 + 1}.{self._made % 250 + 1}"
        server = self._servers.open(page or engine_page(started=time.time()), host)
        name = f"engine-{self._made}"
        ports = [{"name": "http", "containerPort": server.port}] if named_port else []
        notes = {} if named_port else {"prometheus.io/port": str(server.port)}
        self.api.create_namespaced_pod(
            self.name,
            {
                "metadata": {"name": name, "labels": LABELS, "annotations": notes},
                "spec": {"containers": [{"name": "engine", "image": "engine", "ports": ports}]},
            },
        )
        self.set_status(name, host, ready)
        return ClusterPod(name, server)

    def set_status(self, name: str, host: str, ready: bool) -> None:
        """Say what a kubelet would say of a running pod."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        state = {
            "name": "engine",
            "image": "engine",
            "imageID": "",
            "containerID": f"containerd://{name}",
            "ready": ready,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [state],
        }
        self.api.patch_namespaced_pod_status(name, self.name, {"status": status})

    def delete(self, pod: ClusterPod) -> None:
        """Delete a pod and close its server."""
        self.api.delete_namespaced_pod(pod.name, self.name, grace_period_seconds=0)
        self._servers.close(pod.server)
