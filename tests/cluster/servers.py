"""Command lines of etcd and the API server, for every test cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.keys import Authority
from tests.cluster.prepare import PrepareError, program

ISSUER = "https://kubernetes.default.svc"
SERVICES = "10.96.0.0/24"


def etcd(data: Path, port: int, peer_port: int) -> list[str]:
    """etcd on loopback ports; it never syncs its files, since no test outlives the machine.

    Args:
        data: Folder of its data.
        port: Port for clients.
        peer_port: Port for other members, of which there are none.

    Raises:
        PrepareError: It is not installed.
    """
    if shutil.which("etcd") is None:
        raise PrepareError("there is no etcd: run `make test-cluster`")
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        "etcd",
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def api_server(keys: Authority, port: int, etcd_port: int) -> list[str]:
    """The API server; ``server.crt`` among the keys is its certificate.

    Args:
        keys: Its keys.
        port: Port that it listens on.
        etcd_port: Port of etcd.

    Raises:
        PrepareError: It has not been built.
    """
    return [
        str(program("kube-apiserver")),
        f"--secure-port={port}",
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--tls-cert-file={keys.folder}/server.crt",
        f"--tls-private-key-file={keys.folder}/server.key",
        f"--service-account-key-file={keys.accounts}",
        f"--service-account-signing-key-file={keys.accounts}",
        f"--service-account-issuer={ISSUER}",
        f"--service-cluster-ip-range={SERVICES}",
    ]
