"""The node's network namespace: made, removed, and entered by commands and by this process itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.node.layout import ADDRESS, NETWORK
from tests.cluster.servers import SERVICES

_BRIDGE = "node0"
_CLONE_NEWNET = 0x40000000


def namespace() -> Path:
    """File of the namespace."""
    return Path("/run/netns") / NETWORK


def within() -> list[str]:
    """What runs a command in the namespace.

    Not ``ip netns exec``: that mounts /sys anew, and hides the control groups that the kubelet and runc need.
    """
    return ["nsenter", f"--net={namespace()}"]


def create() -> None:
    """Make the namespace with the node's address in it, and no route out."""
    _run("ip", "netns", "add", NETWORK)
    for command in (
        "ip link set lo up",
        # A bridge, for want of dummy devices in small kernels; the kubelet takes no loopback address.
        f"ip link add {_BRIDGE} type bridge",
        f"ip addr add {ADDRESS}/24 dev {_BRIDGE}",
        f"ip link set {_BRIDGE} up",
        # Without it there is no route to a Service's address, and a packet is dropped before kube-proxy's rules see it.
        f"ip route add {SERVICES} dev {_BRIDGE}",
    ):
        _run(*within(), *command.split())
    _run(*within(), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")


def delete() -> None:
    """Remove the namespace, if it is there."""
    if namespace().exists():
        _run("ip", "netns", "delete", NETWORK)


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """This thread, the threads and the programs that it starts, are in the namespace.

    Raises:
        OSError: There is no namespace, or no right to enter it.
    """
    with open("/proc/thread-self/ns/net") as outside, namespace().open() as wanted:
        _enter(wanted.fileno())
        try:
            yield
        finally:
            _enter(outside.fileno())


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
    if library.setns(descriptor, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot enter {namespace()}: {os.strerror(error)}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
