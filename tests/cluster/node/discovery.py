"""Tells DNS of the Services and Prometheus of the pods; one of the node's programs.

Debian has no CoreDNS, and its Prometheus is built without Kubernetes discovery. This does for the tests what they
would do: a name for every Service that has an address, and a target for every pod's port that is named ``http`` or
``metrics``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.node.layout import DOMAIN, Folder
from tests.cluster.node.processes import Programs

PAUSE_SECONDS = 1.0
PORTS = ("http", "metrics")


def service_lines(services: list[Any]) -> str:
    """Lines of a hosts file, sorted."""
    lines = [
        f"{service.spec.cluster_ip} {service.metadata.name}.{service.metadata.namespace}.svc.{DOMAIN}\n"
        for service in services
        if service.spec.cluster_ip not in (None, "", "None")
    ]
    return "".join(sorted(lines))


def pod_targets(pods: list[Any]) -> list[dict[str, Any]]:
    """Prometheus' targets: the running pods' ports, with the labels of a PodMonitor."""
    targets = []
    for pod in pods:
        if pod.status.phase != "Running" or not pod.status.pod_ip:
            continue
        for container in pod.spec.containers:
            for port in container.ports or []:
                if port.name not in PORTS:
                    continue
                labels = {
                    "namespace": pod.metadata.namespace,
                    "pod": pod.metadata.name,
                    "container": container.name,
                }
                address = f"{pod.status.pod_ip}:{port.container_port}"
                targets.append({"targets": [address], "labels": labels})
    return sorted(targets, key=lambda target: target["targets"])


def replace(path: Path, content: str) -> bool:
    """Write a file at once, unless it says the same already.

    Returns:
        Whether it was written.
    """
    if path.exists() and path.read_text() == content:
        return False
    part = path.with_name(f".{path.name}")
    part.write_text(content)
    os.replace(part, path)
    return True


def main() -> None:
    """Look every second, for ever."""
    from kubernetes import client, config

    folder = Folder(Path(sys.argv[1]))
    config.load_kube_config(str(folder.kubeconfig))
    api = client.CoreV1Api()
    programs = Programs(folder, [])
    while True:
        try:
            names = service_lines(api.list_service_for_all_namespaces().items)
            targets = pod_targets(api.list_pod_for_all_namespaces().items)
        except Exception as error:
            # The API server may be gone for a while; what was written stays true until it says otherwise.
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            replace(folder.targets, json.dumps(targets))
            dns = programs.pid("dnsmasq")
            if replace(folder.service_names, names) and dns is not None:
                os.kill(dns, signal.SIGHUP)  # it reads the file again
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
