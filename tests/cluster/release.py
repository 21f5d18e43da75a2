"""Helm and kubectl on the node, and what the tests ask of an installed release."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.node import PROMETHEUS, Folder, within
from tests.exporter.engines import wait_until
from tests.tooling import helm, kubectl

Object = dict[str, Any]
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"


class CommandError(AssertionError):
    """Helm or kubectl has failed; the text is what it wrote."""


class Cluster:
    """The tools, with the node's credentials and in its network.

    Args:
        folder: The node's folder.
        home: Folder for Helm's own files.
    """

    def __init__(self, folder: Folder, home: Path) -> None:
        self.folder = folder
        self._environ = {**os.environ, "KUBECONFIG": str(folder.kubeconfig)}
        for name in ("CACHE", "CONFIG", "DATA"):
            self._environ[f"HELM_{name}_HOME"] = str(home / name.lower())

    def helm(self, *arguments: str, seconds: float = 640) -> str:
        """Run Helm 4.

        Returns:
            What it wrote to standard output.

        Raises:
            CommandError: It failed.
        """
        return self._run([str(helm(4)), *arguments], None, seconds)

    def kubectl(self, *arguments: str, given: str | None = None, seconds: float = 120) -> str:
        """Run kubectl, with ``given`` as its standard input.

        Returns:
            What it wrote to standard output.

        Raises:
            CommandError: It failed.
        """
        return self._run([str(kubectl()), *arguments], given, seconds)

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        self.kubectl("apply", "-f", "-", given="---\n".join(map(json.dumps, objects)))

    def get(self, *what: str) -> Object:
        """An object."""
        found: Object = json.loads(self.kubectl("get", *what, "-o", "json"))
        return found

    def find(self, *what: str) -> list[Object]:
        """Objects."""
        items: list[Object] = self.get(*what)["items"]
        return items

    def _run(self, command: Sequence[str], given: str | None, seconds: float) -> str:
        done = subprocess.run(
            [*within(), *command],
            env=self._environ,
            input=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            name = " ".join([Path(command[0]).name, *command[1:]])
            raise CommandError(f"{name} gave {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


class Release:
    """A release of the chart.

    Args:
        cluster: Where it is installed.
        name: Its name.
        namespace: Its namespace.
    """

    def __init__(self, cluster: Cluster, name: str, namespace: str) -> None:
        self.cluster = cluster
        self.name = name
        self.namespace = namespace
        self.arguments: list[str] = []
        """Chart and values of the first installation."""

    def helm(self, *arguments: str, seconds: float = 640) -> str:
        """Run Helm in the release's namespace."""
        return self.cluster.helm(*arguments, "--namespace", self.namespace, seconds=seconds)

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the release's namespace."""
        return self.cluster.kubectl("--namespace", self.namespace, *arguments)

    def install(self, *arguments: str) -> str:
        """Install it with ``--wait``.

        Args:
            *arguments: Chart and values; upgrades take them too.

        Returns:
            Helm's output, with the notes.
        """
        self.arguments = list(arguments)
        return self.helm("install", self.name, *arguments, "--wait", "--timeout", "600s")

    def upgrade(self, *changes: str, timeout: str = "600s") -> str:
        """Upgrade it with ``--wait``, to the values of the installation and ``changes``."""
        wait = ["--wait", "--timeout", timeout]
        return self.helm("upgrade", self.name, *self.arguments, *changes, *wait)

    def find(self, kind: str, component: str = "") -> list[Object]:
        """The release's objects of a kind, by name."""
        selector = f"{INSTANCE}={self.name}" + (f",{COMPONENT}={component}" if component else "")
        found = self.cluster.find(kind, "--namespace", self.namespace, "-l", selector)
        return sorted(found, key=lambda item: item["metadata"]["name"])

    def pods(self, component: str = "engine") -> list[Object]:
        """Pods that are not about to end."""
        return [
            pod
            for pod in self.find("pods", component)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def ready_pods(
        self, count: int, component: str = "engine", seconds: float = 240
    ) -> list[Object]:
        """Wait until as many pods are ready, and no others are there."""

        def settled() -> list[Object]:
            pods = self.find("pods", component)
            return pods if len(pods) == count and all(map(is_ready, pods)) else []

        pods: list[Object] = wait_until(settled, f"{count} {component} pods are ready", seconds)
        return pods

    def url(self, component: str = "engine") -> str:
        """Address of the component's Service."""
        for service in self.find("services", component):
            if service["spec"]["clusterIP"] != "None":
                port = service["spec"]["ports"][0]["port"]
                return f"http://{service['spec']['clusterIP']}:{port}"
        raise AssertionError(f"{self.name} has no Service for {component}")

    def revision(self) -> int:
        """Number of the release's last revision."""
        return int(json.loads(self.helm("status", self.name, "--output", "json"))["version"])

    def diagnosis(self) -> str:
        """What to read when a release does not come up: its pods, the events and the engines' last lines."""
        told = [self.kubectl("get", "pods,persistentvolumeclaims", "-o", "wide")]
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp").splitlines()
        told += ["\n".join(events[-25:])]
        for pod in self.find("pods"):
            if is_ready(pod):
                continue
            try:
                lines = self.kubectl("logs", name_of(pod), "--tail=30", "--all-containers")
            except CommandError as error:
                lines = str(error)
            told.append(f"--- {name_of(pod)}\n{lines}")
        return "\n".join(told)


def name_of(item: Object) -> str:
    """An object's name."""
    name: str = item["metadata"]["name"]
    return name


def pod_url(pod: Object, port: int = 8000) -> str:
    """Address of a pod itself."""
    return f"http://{pod['status']['podIP']}:{port}"


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    conditions = pod["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def query(expression: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Ask Prometheus: labels -> value."""
    answer = httpx.get(f"{PROMETHEUS}/api/v1/query", params={"query": expression}, timeout=30)
    assert answer.status_code == 200, answer.text
    return {
        tuple(sorted(sample["metric"].items())): float(sample["value"][1])
        for sample in answer.json()["data"]["result"]
    }


def total(expression: str) -> float:
    """Ask Prometheus for a sum; 0 if there is nothing to sum."""
    return sum(query(f"sum({expression})").values())
