"""What tests of the engine's templates share."""

from __future__ import annotations

import json
from typing import Any

from tests.charts.rendering import Render


def pod(rendered: Render) -> dict[str, Any]:
    """Spec of the engine's pods."""
    return rendered.one("Deployment", "engine")["spec"]["template"]["spec"]


def container(rendered: Render) -> dict[str, Any]:
    """The engine's container."""
    (found,) = pod(rendered)["containers"]
    return found


def flags(args: list[str]) -> dict[str, str]:
    """Flags of a command line, without their dashes; those that stand alone are empty."""
    pairs = [each.removeprefix("--").partition("=") for each in args if each.startswith("--")]
    return {name: value for name, _, value in pairs}


def environ(found: dict[str, Any]) -> dict[str, str]:
    """Variables with plain values."""
    return {each["name"]: each["value"] for each in found["env"] if "value" in each}


def offload(found: dict[str, Any]) -> dict[str, Any]:
    """The connector's own settings; empty without a connector."""
    text = flags(found["args"]).get("kv-transfer-config")
    return {} if text is None else json.loads(text)["kv_connector_extra_config"]


def volume(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """A volume of a pod, without its name."""
    (found,) = [each for each in spec["volumes"] if each["name"] == name]
    return {key: value for key, value in found.items() if key != "name"}
