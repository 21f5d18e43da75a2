"""Configuration and handling of engines with tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.harness import Engine
from vllm_spans.sizes import parse_size

PROBES = "tests.offload.probes:"


def connector(**extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with our connector; it loads all that it finds, however fast the machine is."""
    return {
        "kv_connector": "SpansOffloadingConnector",
        "kv_connector_module_path": "vllm_spans.offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"load_when": "always", **extra},
    }


def stock_connector(cpu_memory: str) -> dict[str, Any]:
    """``kv_transfer_config`` with vLLM's own offloading to CPU memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "vllm_spans.offload.host_spec",
            "cpu_bytes_to_use": parse_size(cpu_memory),
            "offload_prompt_only": False,
        },
    }


def both(*connectors: dict[str, Any]) -> dict[str, Any]:
    """``kv_transfer_config`` with connectors side by side."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def probe(engine: Engine, name: str, **kwargs: Any) -> Any:
    """Call a function of ``tests.offload.probes`` in the engine process."""
    return engine.call(PROBES + name, **kwargs)


def forget(engine: Engine, cpu: bool = False) -> None:
    """Empty the KV cache, and CPU memory if asked to."""
    probe(engine, "forget", cpu=cpu)


def moved(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    """Counters that have moved, without their prefix and suffix."""
    now = probe(engine, "counters")
    return {
        name.removeprefix("vllm_spans_").replace("_total", ""): value - before.get(name, 0)
        for name, value in now.items()
        if value != before.get(name, 0)
    }


def block_files(folder: Path) -> list[Path]:
    """All block files below a folder, sorted."""
    return sorted(folder.rglob("*.kv"))


def assert_nothing_left(engine: Engine) -> None:
    """Assert that an idle engine's tiers hold nothing on behalf of anybody."""
    left = probe(engine, "in_use")
    assert not any(left.values()), left
