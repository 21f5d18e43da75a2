"""Keys, certificates and credentials of a test cluster, made with ``openssl``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class Authority:
    """A certificate authority whose keys and certificates lie in one folder.

    Args:
        folder: Where they are; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        make = "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=tests"
        self._openssl(*make.split(), "-days", "30")
        self._openssl("genrsa", "-out", "accounts.key", "2048")

    @property
    def certificate(self) -> Path:
        """The authority's own certificate."""
        return self.folder / "ca.crt"

    @property
    def accounts(self) -> Path:
        """Key that signs the tokens of service accounts."""
        return self.folder / "accounts.key"

    def issue(self, name: str, subject: str, addresses: Sequence[str] = ()) -> None:
        """Write ``name.key`` and ``name.crt``.

        Args:
            name: Name of both files.
            subject: Such as ``/O=system:masters/CN=admin``.
            addresses: ``IP:`` and ``DNS:`` names of a server; none for a client.
        """
        names = f"subjectAltName={','.join(addresses)}"
        extensions = self.folder / f"{name}.extensions"
        extensions.write_text(names if addresses else "extendedKeyUsage=clientAuth")
        request = f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj"
        self._openssl(*request.split(), subject)
        sign = f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30"
        self._openssl(*sign.split(), "-extfile", extensions.name, "-out", f"{name}.crt")

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)


def write_credentials(
    path: Path, server: str, authority: Path, user: Mapping[str, str], namespace: str = "default"
) -> Path:
    """Write a kubeconfig.

    Args:
        path: The file.
        server: Address of the API server.
        authority: Certificate of its authority.
        user: How the client shows who it is, by the names of a kubeconfig.
        namespace: Namespace of the context.

    Returns:
        The file.
    """
    cluster = {"server": server, "certificate-authority": str(authority)}
    context = {"cluster": "c", "user": "u", "namespace": namespace}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": dict(user)}],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
