"""The images that `make images` built, and one engine of them for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from demo.server import free_port
from images.build import ALL
from images.tools import Tool
from tests.images.containers import CACHE, Container, tag
from vllm_spans.patches.stock import patch_set_hash


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/images/" in str(item.path):
            item.add_marker(pytest.mark.images)


@pytest.fixture(scope="session", autouse=True)
def built() -> Tool:
    """buildah, with the images of this checkout in its store.

    An absent or old image fails the tests: they would otherwise tell about another state of the project.
    """
    tool = Tool("buildah")
    absent = [name for name in ALL if not tool.exists(tag(name))]
    assert not absent, f"not built: {', '.join(absent)}; run `make images`"
    for name, image in ALL.items():
        if image.engine:
            found = tool.labels(tag(name)).get("vllm-spans.patch-set")
            assert found == patch_set_hash(), f"{name} is of another checkout; run `make images`"
    return tool


@dataclass(frozen=True)
class Engine:
    """The CPU image's engine with the embedded model."""

    container: Container
    url: str


@pytest.fixture(scope="module")
def engine(built: Tool) -> Iterator[Engine]:
    """An engine that has started."""
    port = free_port()
    command = ["vllm", "serve", "/models/smollm2", "--served-model-name", "smollm2"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with Container(
        "vllm-spans-cpu",
        *command,
        writable=("/tmp", CACHE),
        environ={"VLLM_CPU_KVCACHE_SPACE": "1"},
    ) as container:
        url = f"http://127.0.0.1:{port}"
        container.wait_ready(f"{url}/health", 300)
        yield Engine(container, url)
