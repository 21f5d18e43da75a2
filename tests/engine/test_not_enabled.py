"""Prevents: an installed plugin that changes vLLM although it is not enabled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.engine.harness import ROOT, Engine, engine_env

SCRIPT = """
import importlib, os, sys
assert "VLLM_V1_SPANS_ENABLED" not in os.environ
import vllm_spans.patches as patches

def value(name):
    module, _, path = name.partition(":")
    if not path:
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            path = parts[cut:]
            break
    else:
        found, path = importlib.import_module(module), path.split(".")
    for part in path:
        found = getattr(found, part)
    return found

names = list(patches.PATCHED)
assert len(names) >= 3, names
before = {name: value(name) for name in names}
from vllm_spans.plugin import register
register()
after = {name: value(name) for name in names}
changed = [name for name in names if before[name] is not after[name]]
assert not changed, changed
ours = [n for n in names if "vllm_spans" in (getattr(after[n], "__module__", "") or "")]
assert not ours, ours
print("untouched", len(names))
"""


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the plugin installed and, unless ``env`` says so, not enabled."""
    environment = engine_env(False, **env)
    environment.pop("VLLM_PLUGINS")
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def test_no_attribute_changes() -> None:
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "untouched" in done.stdout


def test_the_same_check_sees_an_enabled_plugin() -> None:
    """The list of patched names is what gets patched, so the test above can fail."""
    script = SCRIPT.replace(
        "register()\nafter", "os.environ['VLLM_V1_SPANS_ENABLED'] = '1'\nregister()\nafter"
    )
    assert script != SCRIPT
    done = run(script)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_zero_is_not_enabled() -> None:
    script = SCRIPT.replace('assert "VLLM_V1_SPANS_ENABLED" not in os.environ\n', "")
    done = run(script, VLLM_V1_SPANS_ENABLED="0")
    assert done.returncode == 0, done.stderr[-3000:]


def test_engine_is_stock(tiny_model: str) -> None:
    """An engine in a process that loads the plugin without enabling it has vLLM's own classes."""
    engine = Engine(tiny_model, spans=False, env={"VLLM_PLUGINS": "vllm_spans"})
    try:
        about: dict[str, Any] = engine.about
        assert not [name for name in about["scheduler"] if "vllm_spans" in name]
        assert engine.call("tests.engine.probes:spans_modules_in_use") == []
        assert engine.counters() == {}
    finally:
        engine.close()


def test_enabled_engine_is_not_stock(spans_engine: Engine) -> None:
    assert [name for name in spans_engine.about["scheduler"] if "vllm_spans" in name]
    assert spans_engine.call("tests.engine.probes:spans_modules_in_use")
