"""Engines with tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.offload.engines import connector


@pytest.fixture(scope="session")
def files_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the shared file tier."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture
def tiers_engine(engines: Any, tiny_model: str, files_folder: Path) -> Any:
    """An engine with both tiers, large enough for everything; the KV cache is empty, the tiers are as they were."""
    return engines.get(
        tiny_model,
        kv_transfer_config=connector(cpu_memory="64MiB", files=str(files_folder)),
    )


@pytest.fixture
def cramped_engine(engines: Any, tiny_model: str, files_folder: Path) -> Any:
    """Small in all: the KV cache holds two or three requests, CPU memory less than one, files a dozen."""
    return engines.get(
        tiny_model,
        num_gpu_blocks_override=44,
        max_model_len=1280,
        max_num_batched_tokens=192,
        max_num_seqs=4,
        kv_transfer_config=connector(
            cpu_memory="1500KiB",
            files=str(files_folder.parent / "cramped"),
            files_limit="12MiB",
            policy="arc",
        ),
    )
