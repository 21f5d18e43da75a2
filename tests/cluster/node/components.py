"""The node's programs, in the order in which they start, and their command lines."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.keys import Authority, write_credentials
from tests.cluster.node.layout import (
    ADDRESS,
    API_PORT,
    DOMAIN,
    ETCD_PEER_PORT,
    ETCD_PORT,
    FIRST_SERVICE,
    NODE_NAME,
    PODS,
    PROMETHEUS,
    Folder,
)
from tests.cluster.prepare import program
from tests.cluster.servers import api_server, etcd

ROOT = Path(__file__).resolve().parents[3]
SERVER = f"https://127.0.0.1:{API_PORT}"
_USERS = {
    "admin": "/O=system:masters/CN=admin",
    "controllers": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE_NAME}",
    "proxy": "/CN=system:kube-proxy",
}


def make_keys(folder: Folder) -> Authority:
    """Keys of the servers, and credentials of all users."""
    keys = Authority(folder.keys)
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    addresses = [f"IP:{address}" for address in ("127.0.0.1", ADDRESS, FIRST_SERVICE)]
    keys.issue("server", "/CN=kube-apiserver", [*addresses, *(f"DNS:{name}" for name in names)])
    keys.issue("node", f"/CN={NODE_NAME}", [f"IP:{ADDRESS}", f"DNS:{NODE_NAME}"])
    for user, subject in _USERS.items():
        keys.issue(user, subject)
        files = {
            "client-certificate": str(folder.keys / f"{user}.crt"),
            "client-key": str(folder.keys / f"{user}.key"),
        }
        write_credentials(folder.credentials(user), SERVER, keys.certificate, files)
    return keys


def control_plane(folder: Folder, keys: Authority) -> dict[str, list[str]]:
    """etcd and the API server: name -> command."""
    admin = folder.keys / "admin"
    server = api_server(keys, API_PORT, ETCD_PORT)
    server += ["--bind-address=0.0.0.0", f"--advertise-address={ADDRESS}"]
    server += [f"--client-ca-file={keys.certificate}", "--authorization-mode=Node,RBAC"]
    server += [f"--kubelet-client-certificate={admin}.crt", f"--kubelet-client-key={admin}.key"]
    server += [f"--kubelet-certificate-authority={keys.certificate}"]
    server += ["--kubelet-preferred-address-types=InternalIP", "--allow-privileged=true"]
    return {
        "etcd": etcd(folder.data("etcd"), ETCD_PORT, ETCD_PEER_PORT),
        "kube-apiserver": server,
    }


def services(folder: Folder) -> dict[str, list[str]]:
    """What does not need the API server."""
    dns = ["dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--pid-file=", "--user=root"]
    dns += ["--no-hosts", "--no-resolv", f"--addn-hosts={folder.service_names}"]
    dns += [f"--listen-address={ADDRESS}", "--bind-interfaces"]
    dns += [f"--domain={DOMAIN}", f"--local=/{DOMAIN}/"]
    prometheus = ["prometheus", f"--config.file={folder.config('prometheus.yaml')}"]
    prometheus += [f"--storage.tsdb.path={folder.data('prometheus')}"]
    prometheus += [f"--web.listen-address={PROMETHEUS.removeprefix('http://')}"]
    return {
        "containerd": ["containerd", "-c", str(folder.config("containerd.toml"))],
        "registry": ["docker-registry", "serve", str(folder.config("registry.yaml"))],
        "dnsmasq": dns,
        "prometheus": [*prometheus, "--log.level=warn"],
    }


def controllers(folder: Folder, keys: Authority) -> dict[str, list[str]]:
    """What watches the API server."""
    return {
        "kube-controller-manager": [
            str(program("kube-controller-manager")),
            *_secured(folder, "controllers"),
            f"--service-account-private-key-file={keys.accounts}",
            f"--root-ca-file={keys.certificate}",
            "--use-service-account-credentials=true",
            f"--flex-volume-plugin-dir={folder.data('volume-plugins')}",
        ],
        "kube-scheduler": [str(program("kube-scheduler")), *_secured(folder, "scheduler")],
        "discovery": [
            *("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.cluster.node.discovery"),
            str(folder.root),
        ],
    }


def node(folder: Folder) -> dict[str, list[str]]:
    """What runs pods."""
    key = folder.keys / "node"
    kubelet = [str(program("kubelet")), f"--config={folder.config('kubelet.yaml')}"]
    kubelet += [f"--kubeconfig={folder.credentials('kubelet')}"]
    kubelet += [f"--hostname-override={NODE_NAME}", f"--node-ip={ADDRESS}"]
    kubelet += ["--container-runtime=remote"]
    kubelet += [f"--container-runtime-endpoint=unix://{folder.socket}"]
    kubelet += [f"--root-dir={folder.data('kubelet')}", f"--cert-dir={folder.data('kubelet-keys')}"]
    kubelet += [f"--tls-cert-file={key}.crt", f"--tls-private-key-file={key}.key"]
    proxy = [str(program("kube-proxy")), f"--kubeconfig={folder.credentials('proxy')}"]
    proxy += [f"--hostname-override={NODE_NAME}", "--proxy-mode=iptables", f"--cluster-cidr={PODS}"]
    # Limits of the connection table are the whole machine's, not the namespace's to change.
    proxy += ["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]
    proxy += ["--conntrack-tcp-timeout-close-wait=0"]
    proxy += ["--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249"]
    return {"kubelet": kubelet, "kube-proxy": proxy}


def _secured(folder: Folder, user: str) -> list[str]:
    path = folder.credentials(user)
    flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [
        *(f"--{flag}={path}" for flag in flags),
        "--bind-address=127.0.0.1",
        "--port=0",
        "--leader-elect=false",
    ]
