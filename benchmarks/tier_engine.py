"""What benchmarks need of an engine with tiers: its configuration, and how to empty a tier."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess


def tiers_config(cpu_memory: str, files: Path) -> dict[str, Any]:
    """``kv_transfer_config`` of an engine with CPU memory and files behind its KV cache."""
    return {
        "kv_connector": "SpansOffloadingConnector",
        "kv_connector_module_path": "vllm_spans.offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_memory": cpu_memory, "files": str(files)},
    }


def forget(engine: EngineProcess, connector: bool) -> None:
    """Empty the KV cache, and CPU memory behind it if asked to; files stay.

    Raises:
        RuntimeError: Something is still in use.
    """
    if not engine.ask("reset", connector=connector)["done"]:
        raise RuntimeError("the caches could not be emptied")


def wait_written(files: Path) -> None:
    """Wait until the file tier has caught up: no new file for a while."""
    before = -1
    while (now := sum(1 for _ in files.rglob("*.kv"))) != before:
        before = now
        time.sleep(0.5)
