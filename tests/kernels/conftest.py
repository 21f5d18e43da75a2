"""The kernels run on a GPU where there is one, otherwise under Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before any module of kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, the sizes that need a GPU."""
    here = Path(__file__).parent
    for item in items:
        if (
            here in item.path.parents
            and item.get_closest_marker("gpu")
            and not torch.cuda.is_available()
        ):
            item.add_marker(pytest.mark.skip(reason="a size for a GPU, and there is none"))


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
