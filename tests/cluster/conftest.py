"""What the tests of a session share: the API server alone, and the whole node with images and chart in its registry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.cluster import node as nodes
from tests.cluster import publish, too_old
from tests.cluster.control_plane import ControlPlane
from tests.cluster.fleet import FleetNamespace
from tests.cluster.release import Cluster
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


@pytest.fixture(scope="session")
def node() -> Iterator[nodes.Folder]:
    """The whole node; one that was up before stays up."""
    folder = nodes.Folder()
    was_up = nodes.status(folder).get("node") == "Ready"
    nodes.up(folder)
    yield folder
    if not was_up:
        nodes.down(folder)
        assert not nodes.leftovers(folder)


@pytest.fixture(scope="session")
def cluster(node: nodes.Folder, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Helm and kubectl on the node."""
    return Cluster(node, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def chart(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The chart in the registry, with the images that it names: arguments of ``helm install``."""
    publish.build_images()
    publish.push_images()
    return publish.push_chart(cluster, tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="module")
def inside(node: nodes.Folder) -> Iterator[None]:
    """This process is in the node's network."""
    with nodes.inside():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what the node's server is too old for."""
    if too_old.FOUND:
        terminalreporter.section("rendered and schema-checked only: the node's server is too old")
        for line in too_old.FOUND:
            terminalreporter.write_line(line)
