"""Prevents: an image with a vLLM that is not the one that vllm_spans patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from images.build import ALL, PREFIX, Build
from images.tools import Tool
from images.versions import ImageError
from images.wheels import locked
from tests.images.containers import podman, tag

STAND_IN = (
    tag("vllm-spans").replace("vllm-spans:", "vllm-spans-stand-in:").removesuffix("-stand-in")
)
ALTERED = f"{PREFIX}/vllm-spans-test-altered"
RESULT = f"{PREFIX}/vllm-spans-test-result"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No other build on this machine changes the folders that these builds are made of; a failed one leaves nothing."""
    with locked():
        before = podman("ps", "--all", "--external", "--quiet")
        yield
        assert podman("ps", "--all", "--external", "--quiet") == before


@pytest.fixture
def altered(built: Tool, tmp_path: Path) -> Iterator[str]:
    """The stand-in for upstream's image, with one patched method of vLLM changed."""
    (tmp_path / "Containerfile").write_text(
        f"FROM {STAND_IN}\n"
        "RUN cd /opt/vllm-spans/lib/python3*/site-packages/vllm/v1/engine "
        "&& sed -i 's/def process_inputs(/def process_inputs(  # altered/' input_processor.py "
        "&& grep -q '# altered' input_processor.py\n"
    )
    built.build(tmp_path, tmp_path / "Containerfile", ALTERED, {})
    yield ALTERED
    podman("rmi", "--force", ALTERED)


def test_an_altered_vllm_fails_the_build(altered: str, built: Tool) -> None:
    """Its version is the right one; the layer that is built on it is the one that the real image gets."""
    with pytest.raises(ImageError) as caught:
        Build(built, engine_base=altered).make(ALL["vllm-spans"], RESULT)
    assert "gate: the installed vLLM differs" in str(caught.value)
    assert "vllm.v1.engine.input_processor:InputProcessor.process_inputs" in str(caught.value)
    assert not built.exists(RESULT)


def test_a_label_that_would_lie_fails_the_build(
    built: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("images.build.patch_set_hash", lambda: "0123456789abcdef")
    with pytest.raises(ImageError, match="gate: the label says patch set 0123456789abcdef"):
        Build(built, engine_base=STAND_IN).make(ALL["vllm-spans"], RESULT)
    assert not built.exists(RESULT)


def test_a_base_without_vllm_fails_the_build(built: Tool) -> None:
    """As an image that was named by mistake."""
    with pytest.raises(ImageError, match="No module named pip"):
        Build(built, engine_base=tag("spans-exporter")).make(ALL["vllm-spans"], RESULT)
    assert not built.exists(RESULT)
