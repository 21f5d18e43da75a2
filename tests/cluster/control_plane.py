"""A real etcd and a real kube-apiserver on loopback ports, without kubelets: pods are what the tests write into it."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path
from typing import Any

from demo.server import free_port
from tests.cluster.keys import Authority, write_credentials
from tests.cluster.servers import ISSUER, api_server, etcd
from tests.exporter.engines import wait_until

MASTERS = "system:masters"


class ControlPlane:
    """etcd and kube-apiserver; a context manager.

    Args:
        folder: Empty folder for data, keys and logs.

    Attributes:
        api: Client with all rights.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._etcd_port = free_port()
        self._admin_token = secrets.token_hex(16)
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self.api: Any = None

    def __enter__(self) -> ControlPlane:
        from kubernetes import client, config

        self._keys = self._make_keys()
        try:
            self._start_etcd()
            self.start_server()
            configuration = client.Configuration()
            admin = str(self.kubeconfig("admin", self._admin_token))
            config.load_kube_config(admin, client_configuration=configuration)
            self.client = client.ApiClient(configuration)
            self.api = client.CoreV1Api(self.client)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_server()
        _stop(self._etcd)

    def start_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        command = api_server(self._keys, self._port, self._etcd_port)
        command += ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"]
        command += ["--endpoint-reconciler-type=none", "--allow-privileged=false"]
        command += [f"--token-auth-file={self._folder}/tokens.csv", "--authorization-mode=RBAC"]
        # Its tokens for pods are made by a controller that does not run here.
        command += ["--disable-admission-plugins=ServiceAccount"]
        self._server = self._run("apiserver", command)
        wait_until(self._is_ready, "the API server is ready", 120)

    def stop_server(self) -> None:
        """End the API server; what it has stored stays."""
        _stop(self._server)

    def kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """A file of credentials.

        Args:
            name: Its name.
            token: Token of the user or service account.
            namespace: Namespace of its context.
        """
        path = self._folder / f"{name}.json"
        server = f"https://127.0.0.1:{self._port}"
        return write_credentials(path, server, self._keys.certificate, {"token": token}, namespace)

    def service_account(self, name: str, namespace: str) -> Path:
        """Create a service account without any rights.

        Returns:
            Its file of credentials.
        """
        from kubernetes import client

        meta = client.V1ObjectMeta(name=name)
        self.api.create_namespaced_service_account(
            namespace, client.V1ServiceAccount(metadata=meta)
        )
        spec = client.V1TokenRequestSpec(audiences=[ISSUER], expiration_seconds=7200)
        wanted = client.AuthenticationV1TokenRequest(spec=spec)
        made = self.api.create_namespaced_service_account_token(name, namespace, wanted)
        return self.kubeconfig(f"{namespace}-{name}", made.status.token, namespace)

    def log(self, name: str = "apiserver") -> str:
        """What a program has written."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _start_etcd(self) -> None:
        command = etcd(self._folder / "etcd", self._etcd_port, free_port())
        self._etcd = self._run("etcd", command)

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _is_ready(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, f"the API server has ended\n{self.log()[-3000:]}"
        import httpx

        context = httpx.create_ssl_context(verify=str(self._keys.certificate))
        headers = {"Authorization": f"Bearer {self._admin_token}"}
        url = f"https://127.0.0.1:{self._port}/readyz"
        try:
            return httpx.get(url, headers=headers, verify=context, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _make_keys(self) -> Authority:
        (self._folder / "tokens.csv").write_text(f'{self._admin_token},admin,admin,"{MASTERS}"\n')
        keys = Authority(self._folder / "keys")
        keys.issue("server", "/CN=kube-apiserver", ["IP:127.0.0.1", "DNS:localhost"])
        return keys


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
