"""Prevents: an installed plugin that changes vLLM although it is not enabled."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.harness import ROOT, Engine, engine_env

# Everything that hangs on a vLLM module or class, by identity; containers by their content.
SNAPSHOT = """
import importlib, json, os, sys, types
import vllm.entrypoints.openai.chat_completion.batch_serving
import vllm.entrypoints.openai.completion.serving
import vllm.entrypoints.openai.api_server, vllm.v1.engine.async_llm, vllm.entrypoints.llm
import vllm.v1.core.sched.async_scheduler, vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.gpu_model_runner, vllm.v1.attention.backends.cpu_attn
import vllm.model_executor.layers.rotary_embedding
from vllm_spans.patches import PATCHED
for name in PATCHED:
    importlib.import_module(name.partition(":")[0])

def mark(value):
    if isinstance(value, dict):
        return {str(k): id(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return sorted(map(str, map(id, value)))
    return id(value)

# Lazily filled caches of the libraries themselves.
NOISE = ("__", "_abc_", "_cache", "logger", "_lock")

def snapshot():
    seen = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "vllm" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if name.startswith(NOISE) or isinstance(value, types.ModuleType):
                continue
            seen[f"{module_name}:{name}"] = mark(value)
            if isinstance(value, type) and value.__module__ == module_name:
                for inner, member in list(vars(value).items()):
                    if not inner.startswith(NOISE) or inner in ("__init__", "__call__"):
                        seen[f"{module_name}:{name}.{inner}"] = mark(member)
    return seen

from vllm_spans.plugin import register
if os.environ.get("VLLM_V1_SPANS_ENABLED") == "1":
    # What the plugin imports by itself is no change of vLLM.
    from vllm_spans import patches
before = snapshot()
register()
after = snapshot()
changed = sorted(k for k in before.keys() | after.keys()
                 if before.get(k) != after.get(k) and (k in before or k.partition(":")[0] in
                 {b.partition(":")[0] for b in before}))
print("RESULT " + json.dumps({"names": len(before), "changed": changed, "patched": list(PATCHED)}))
"""


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the plugin installed and, unless ``env`` says so, not enabled."""
    environment = engine_env(False, **env)
    environment.pop("VLLM_PLUGINS")
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def changes(**env: str) -> dict[str, Any]:
    """What ``register`` changes of vLLM in a fresh process."""
    done = run(SNAPSHOT, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.parametrize("env", [{}, {"VLLM_V1_SPANS_ENABLED": "0"}], ids=["unset", "zero"])
def test_no_attribute_changes(env: dict[str, str]) -> None:
    found = changes(**env)
    assert found["names"] > 5000
    assert found["changed"] == []


def test_every_patch_is_listed() -> None:
    """Enabled, exactly the listed names change: the test above can fail, and the list is true."""
    found = changes(VLLM_V1_SPANS_ENABLED="1")
    listed = set(found["patched"])
    assert found["changed"]
    # A name that is added to a listed class or table is listed by that class or table.
    missing = [
        name
        for name in found["changed"]
        if name not in listed and name.rpartition(".")[0] not in listed
    ]
    assert not missing, f"patched and not in vllm_spans.patches.PATCHED: {missing}"
    idle = [name for name in listed if not any(c.startswith(name) for c in found["changed"])]
    assert not idle, f"in vllm_spans.patches.PATCHED and not patched: {idle}"


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
