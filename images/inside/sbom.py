"""Runs inside an image while it is built: prints its bill of materials as CycloneDX 1.5 JSON.

``sbom.py NAME VERSION [MODEL_FILE]``. It lists what Python's and Debian's own records say is installed, so that
nothing can be forgotten that a package manager put there, and needs only the standard library, so that it runs in
every image.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]


def python_packages() -> list[Component]:
    """Every distribution that this interpreter finds."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        purl = f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(version, safe='!')}"
        component = _component("library", name, version, purl)
        licence = distribution.metadata["License-Expression"]
        if licence:
            component["licenses"] = [{"expression": licence}]
        found[purl] = component
    return [found[purl] for purl in sorted(found)]


def debian_packages() -> list[Component]:
    """Every package that dpkg has on record; none where there is no dpkg."""
    if shutil.which("dpkg-query") is None:
        return []
    wanted = "${db:Status-Status} ${Package} ${Version} ${Architecture}\n"
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", wanted], capture_output=True, text=True, check=True
    )
    distribution = _os_release().get("ID", "debian")
    components = []
    for line in sorted(listed.stdout.splitlines()):
        status, name, version, architecture = line.split(" ")
        if status == "installed":
            purl = f"pkg:deb/{distribution}/{quote(name)}@{quote(version)}?arch={architecture}"
            components.append(_component("library", name, version, purl))
    return components


def document(name: str, version: str, model: Path | None = None) -> dict[str, Any]:
    """The whole bill of materials. It bears no time and no serial number: the same image gives the same file."""
    system = _os_release()
    components = [
        {
            "type": "operating-system",
            "bom-ref": "os",
            "name": system.get("ID", "linux"),
            "version": system.get("VERSION_ID", "unknown"),
        },
        *debian_packages(),
        *python_packages(),
    ]
    if model is not None:
        with model.open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
        components.append(
            {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": "SmolLM2-135M-Instruct",
                "version": "1",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": name, "name": name, "version": version}
        },
        "components": components,
    }


def _component(kind: str, name: str, version: str, purl: str) -> Component:
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _os_release() -> dict[str, str]:
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key: value.strip('"') for key, _, value in pairs}


if __name__ == "__main__":
    name, version, *models = sys.argv[1:]
    json.dump(document(name, version, *map(Path, models)), sys.stdout, indent=1)
