"""The image of the process that holds a pod's namespaces, made without any container tool."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.cluster.node.layout import PAUSE_IMAGE

SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void leave(int signal) { _exit(0); }
static void reap(int signal) { while (waitpid(-1, 0, WNOHANG) > 0); }
int main() {
  signal(SIGINT, leave); signal(SIGTERM, leave); signal(SIGCHLD, reap);
  for (;;) pause();
}
"""


def write_image(path: Path) -> None:
    """Write an archive that ``ctr images import`` takes.

    Args:
        path: The archive.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pause"
        compile_it = ["gcc", "-Os", "-static", "-s", "-x", "c", "-", "-o", str(program)]
        subprocess.run(compile_it, input=SOURCE, text=True, check=True, capture_output=True)
        layer = _tar({"pause": program.read_bytes()})
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_sha256(layer)}"]},
        }
    ).encode()
    name = f"{_sha256(config)}.json"
    manifest = [{"Config": name, "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]
    files = {"layer.tar": layer, name: config, "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(_tar(files))


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
