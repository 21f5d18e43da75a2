"""The kernels run on a GPU where there is one, otherwise under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

# `make test` puts Triton into a folder of its own, so that vLLM's CPU build does not find it.
APART = Path(sys.prefix) / "kernels"
if importlib.util.find_spec("triton") is None and APART.is_dir():
    sys.path.append(str(APART))

MISSING = "triton is not installed: make test installs it with requirements/kernels.lock"
LATE = "triton was imported without its interpreter: run tests/kernels in a process of its own"
skip = "" if importlib.util.find_spec("triton") else MISSING
if not torch.cuda.is_available() and not skip:
    # Read when Triton and the kernels are imported.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        skip = LATE
    os.environ["TRITON_INTERPRET"] = "1"


class Skipped(pytest.Module):
    """A module of tests that says why it cannot be imported here."""

    def collect(self) -> list[pytest.Item]:
        """Skip instead of importing."""
        pytest.skip(skip, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Skip modules by name where Triton is missing."""
    return Skipped.from_parent(parent, path=module_path) if skip else None


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
