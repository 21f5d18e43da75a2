"""Marks these tests ``charts``, which keeps them, and the tools that they fetch, out of ``make test``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.charts.rendering import HELMS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("charts")


@pytest.fixture(params=HELMS, ids=lambda major: f"helm{major}")
def helm(request: pytest.FixtureRequest) -> int:
    """Each major version of Helm."""
    return int(request.param)
