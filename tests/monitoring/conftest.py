"""One fleet for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.monitoring.live import Live


@pytest.fixture(scope="session")
def live(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Servers, exporters and Prometheus under traffic."""
    running = Live(tiny_model, tmp_path_factory.mktemp("live"))
    yield running
    running.close()
