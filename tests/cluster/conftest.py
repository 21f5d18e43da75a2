"""The API server, shared by the tests of a session, and a namespace for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.fleet import FleetNamespace
from tests.exporter.engines import EnginePods

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running API server."""
    with ControlPlane(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def fleet(control_plane: ControlPlane) -> Iterator[FleetNamespace]:
    """A namespace of its own with nothing in it."""
    with EnginePods() as servers:
        yield FleetNamespace(control_plane, f"fleet-{next(_numbers)}", servers)
