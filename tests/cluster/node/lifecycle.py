"""Bring the node up, look at it, and take it down."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.cluster.node import components, config, network, pause
from tests.cluster.node.layout import (
    CGROUP,
    NODE_NAME,
    PAUSE_IMAGE,
    POD_LOG_LINKS,
    POD_LOGS,
    Folder,
)
from tests.cluster.node.processes import ProgramError, Programs, end, with_argument
from tests.cluster.prepare import PROGRAMS, PrepareError, install, prepare
from tests.tooling import ToolError, kubectl

PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "docker-registry": "docker-registry",
    "dnsmasq": "dnsmasq-base",
    "conntrack": "conntrack",
    "iptables": "iptables",
    "ip": "iproute2",
    "prometheus": "prometheus",
    "buildah": "buildah",
    "gcc": "gcc libc6-dev",
}
READY_SECONDS = 180.0
# Those that use others end first; without etcd the API server would take its whole grace.
_STOP_ORDER = (
    "kube-proxy",
    "kubelet",
    "kube-controller-manager",
    "kube-scheduler",
    "discovery",
    "kube-apiserver",
)


class NodeError(RuntimeError):
    """The node cannot be brought up or taken down; the text says where to look."""


def up(folder: Folder | None = None) -> Folder:
    """Bring the node up, unless it is.

    Args:
        folder: Where its files go.

    Returns:
        The folder.

    Raises:
        NodeError: Something is missing or does not start. What had started is taken down; the logs stay.
    """
    folder = folder or Folder()
    if os.geteuid():
        raise NodeError("a node needs root: it makes a network namespace and runs containers")
    if _is_whole(folder):
        return folder
    down(folder)
    try:
        prepare(PROGRAMS)
        install(PACKAGES)
        _start(folder)
    except BaseException as error:
        reason = f"{error}\nLogs are in {folder.logs}"
        down(folder)
        if isinstance(error, PrepareError | ProgramError | ToolError | OSError | NodeError):
            raise NodeError(reason) from error
        if isinstance(error, subprocess.CalledProcessError):
            raise NodeError(f"{error}: {error.stderr}") from error
        raise
    return folder


def status(folder: Folder | None = None) -> dict[str, str]:
    """State of each program and of the node, by name; empty when nothing runs."""
    folder = folder or Folder()
    programs = Programs(folder, network.within())
    states = {}
    for name in programs.names():
        pid = programs.pid(name)
        states[name] = "has ended" if pid is None else f"runs as {pid}"
    if states:
        states["node"] = "Ready" if _node_is_ready(folder) else "not ready"
    return states


def down(folder: Folder | None = None) -> None:
    """End every program, unmount, and remove the namespace, the control groups and the data. The logs stay.

    Args:
        folder: The node's folder.

    Raises:
        NodeError: Something could not be removed.
    """
    folder = folder or Folder()
    programs = Programs(folder, network.within())
    for name in _STOP_ORDER:
        programs.stop(name)
    _end_containers(folder, programs)
    for name in programs.names():
        programs.stop(name)
    for pid in with_argument(str(folder.socket)):  # shims that outlived their containers
        end(pid, signal.SIGKILL, 5)
    for mount in _mounts(folder.root):
        subprocess.run(["umount", mount], check=False, capture_output=True)
    if left := _mounts(folder.root):
        raise NodeError(f"still mounted, because something uses it: {', '.join(left)}")
    network.delete()
    _save_pod_logs(folder)
    for group in _control_groups():
        group.rmdir()
    for path in (folder.root / "data", folder.root / "config", folder.keys, folder.pids):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.root.glob("*.json"):
        path.unlink()
    for pattern in ("containerd.sock*", "service-names", ".service-names"):
        for path in folder.root.glob(pattern):
            path.unlink()


def leftovers(folder: Folder | None = None) -> list[str]:
    """What is there of a node that should be down, but for its logs."""
    folder = folder or Folder()
    found = [f"process {pid}" for pid in with_argument(str(folder.socket))]
    found += [f"mount {point}" for point in _mounts(folder.root)]
    found += [str(group) for group in _control_groups()]
    found += [str(path) for path in folder.root.glob("*") if path != folder.logs]
    return found + ([str(network.namespace())] if network.namespace().exists() else [])


def _is_whole(folder: Folder) -> bool:
    states = status(folder)
    good = all(state.startswith(("runs as", "Ready")) for state in states.values())
    return bool(states) and good and network.namespace().exists()


def _start(folder: Folder) -> None:
    folder.root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder.logs, ignore_errors=True)
    config.write_all(folder)
    folder.data("").mkdir()
    folder.service_names.touch()
    folder.targets.write_text("[]")
    _make_control_groups()
    network.create()
    keys = components.make_keys(folder)
    programs = Programs(folder, network.within())
    _start_all(programs, components.control_plane(folder, keys))
    _start_all(programs, components.services(folder))
    image = folder.data("pause.tar")
    pause.write_image(image)
    _wait(programs, "containerd", lambda: _ctr(folder, "images", "import", str(image)))
    # An import may be asked for before the snapshotter is there, and then leaves an image without content.
    if PAUSE_IMAGE not in _ctr_output(folder, "images", "ls", "-q"):
        raise NodeError(f"containerd has no {PAUSE_IMAGE} after its import")
    ready = ("get", "--raw", "/readyz")
    _wait(programs, "the API server", lambda: _kubectl(folder, *ready))
    _start_all(programs, components.controllers(folder, keys))
    _start_all(programs, components.node(folder))
    _wait(programs, "the node", lambda: _node_is_ready(folder))
    # Pods need the account that the controller manager makes for each namespace.
    account = ("get", "serviceaccount", "default", "--namespace", "default")
    _wait(programs, "the account of the default namespace", lambda: _kubectl(folder, *account))


def _start_all(programs: Programs, commands: Mapping[str, list[str]]) -> None:
    for name, command in commands.items():
        programs.start(name, command)


def _wait(programs: Programs, what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not done():
        programs.check()
        if time.monotonic() > deadline:
            raise NodeError(f"{what} is not ready after {READY_SECONDS:.0f} s")
        time.sleep(0.25)


def _kubectl(folder: Folder, *arguments: str) -> bool:
    return _kubectl_output(folder, *arguments) is not None


def _kubectl_output(folder: Folder, *arguments: str) -> str | None:
    command = [*network.within(), str(kubectl()), f"--kubeconfig={folder.kubeconfig}"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def _node_is_ready(folder: Folder) -> bool:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return _kubectl_output(folder, "get", "node", NODE_NAME, "-o", f"jsonpath={path}") == "True"


def _ctr(folder: Folder, *arguments: str) -> bool:
    command = ["ctr", "--address", str(folder.socket), "--namespace", "k8s.io", *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _ctr_output(folder: Folder, *arguments: str) -> str:
    command = ["ctr", "--address", str(folder.socket), "--namespace", "k8s.io", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _end_containers(folder: Folder, programs: Programs) -> None:
    if programs.pid("containerd") is None:
        return
    for task in _ctr_output(folder, "tasks", "ls", "--quiet").split():
        _ctr(folder, "tasks", "rm", "--force", task)


def _mounts(root: Path) -> list[str]:
    """Mount points below a folder, the innermost first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1] for line in lines]
    return sorted((point for point in points if point.startswith(f"{root}/")), reverse=True)


def _make_control_groups() -> None:
    for controller in _controllers():
        group = controller / CGROUP
        group.mkdir(exist_ok=True)
        shares = group / "cpu.shares"
        # A group competes with what is outside as one, whatever the niceness of those in it.
        if os.nice(0) > 0 and shares.exists():
            shares.write_text("16")


def _control_groups() -> Iterator[Path]:
    """The node's control groups, the innermost first."""
    for controller in _controllers():
        for folder, _, _ in os.walk(controller / CGROUP, topdown=False):
            yield Path(folder)


def _controllers() -> list[Path]:
    """Hierarchies of control groups; of version 2 there is but one."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return [top]
    return [path for path in top.iterdir() if path.is_dir() and not path.is_symlink()]


def _save_pod_logs(folder: Folder) -> None:
    """Move what the containers have written to the other logs."""
    if not POD_LOGS.exists() or not folder.root.exists():
        return
    for path in POD_LOGS.iterdir():
        target = folder.logs / "pods" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(path, target)
    for link in POD_LOG_LINKS.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
