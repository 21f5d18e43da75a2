"""Prevents: a page that differs from docs/metrics.md, a label that appears only with its first event, and a report that
breaks the loop in which an API server takes answers from the engine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_spans.metrics.counters import (
    BUILD_INFO,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    ENGINE_LABELS,
    LOAD_FAILURES,
    PREFIX,
    REJECTED,
    REJECTIONS,
    STORE_FAILURES,
    EngineMetrics,
)
from vllm_spans.metrics.hot_spans import LABELS as HOT_LABELS
from vllm_spans.metrics.hot_spans import NAME

ROOT = Path(__file__).resolve().parents[2]


def documented() -> dict[str, tuple[str, str]]:
    """Metric name -> type and labels, as the table of the engine in docs/metrics.md has them."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = text.partition("## Engine")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(vllm_spans_\w+)` \| (\w+) \| ([^|]*) \|", table, re.MULTILINE)
    return {name: (kind, labels.strip().replace("`", "")) for name, kind, labels in rows}


def test_docs_list_exactly_what_the_code_exports() -> None:
    exported = {}
    for spec in ENGINE_COUNTERS:
        labels = ", ".join([*ENGINE_LABELS, *([spec.label] if spec.label else [])])
        exported[f"{PREFIX}{spec.name}_total"] = ("counter", labels)
    for spec in ENGINE_GAUGES:
        exported[PREFIX + spec.name] = ("gauge", ", ".join(ENGINE_LABELS))
    exported[f"{PREFIX}{REJECTED.name}_total"] = ("counter", f"model_name, {REJECTED.label}")
    exported[NAME] = ("gauge", ", ".join(HOT_LABELS))
    info = "model_name, version, vllm_version, patch_set, gap_policy, gap_length, block_size"
    exported[PREFIX + BUILD_INFO.name] = ("gauge", info)
    assert documented() == exported


def test_docs_list_every_reason() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    offload = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
    for reason in REJECTIONS:
        assert f"| `{reason}` |" in text, reason
    for reason in (*LOAD_FAILURES, *STORE_FAILURES):
        assert f"`{reason}`" in offload, reason


def test_every_reason_to_refuse_is_known_beforehand() -> None:
    """The reason is the last argument of ``MarkupError``: each in the source is a label from the start on."""
    found = set()
    for path in (ROOT / "vllm_spans").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name == "MarkupError" or attribute == "rejected":
                found |= {
                    part.value
                    for part in ast.walk(node.args[-1])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
    assert len(found) > 8
    assert found - {"reason"} == set(REJECTIONS)


def page(code: str, tmp_path: Path, processes: int = 1) -> dict[str, float]:
    """The page of API servers that each run ``code`` with ``metrics``, an ``EngineMetrics`` of engine 0, at hand.

    Each is a process of its own with a registry of its own; several share ``PROMETHEUS_MULTIPROC_DIR``.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.parser import text_string_to_metric_families

    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    head = "from vllm_spans.metrics.counters import *\nmetrics = EngineMetrics('m', 0)\n"
    for number in range(processes):
        subprocess.run(
            [sys.executable, "-c", f"{head}number = {number}\n{code}"],
            env=environ,
            cwd=ROOT,
            check=True,
        )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    return {
        "/".join([sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))]): (
            sample.value
        )
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_several_api_servers_show_one_sum(tmp_path: Path) -> None:
    """An engine reports to whichever server takes its answers; a gauge is the last word of any of them."""
    code = """
metrics.add({"lookup_tokens": 100 + number, "reused_tokens/cpu": 7, "cpu_memory_blocks": 5 - number})
EngineMetrics("m", 1).add({"lookup_tokens": 1})
rejected("m", "role")
set_build_info(model_name="m", version="1")
"""
    seen = page(code, tmp_path, processes=2)
    assert seen["vllm_spans_lookup_tokens_total/engine=0/model_name=m"] == 201
    assert seen["vllm_spans_lookup_tokens_total/engine=1/model_name=m"] == 2
    assert seen["vllm_spans_reused_tokens_total/engine=0/model_name=m/tier=cpu"] == 14
    assert seen["vllm_spans_reused_tokens_total/engine=1/model_name=m/tier=file"] == 0
    assert seen["vllm_spans_cpu_memory_blocks/engine=0/model_name=m"] == 4
    assert seen["vllm_spans_rejected_total/model_name=m/reason=role"] == 2
    assert seen["vllm_spans_rejected_total/model_name=m/reason=offsets"] == 0
    assert seen["vllm_spans_build_info/model_name=m/version=1"] == 1


@pytest.mark.parametrize(
    "report",
    [
        {"no_such_metric": 1},
        {"lookup_tokens/label": 1},
        {"requests": 1},
        {"lookup_tokens": -5},
        {"lookup_tokens": "many"},
        {"cpu_memory_blocks": None},
        {7: 1},
    ],
)
def test_a_report_that_makes_no_sense_is_left_out(
    report: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What else it holds is counted, and a line says what was not."""
    from prometheus_client import REGISTRY

    metrics = EngineMetrics("m", 0)
    name, labels = "vllm_spans_pad_tokens_total", {"model_name": "m", "engine": "0"}
    before = REGISTRY.get_sample_value(name, labels)
    lookups = REGISTRY.get_sample_value("vllm_spans_lookup_tokens_total", labels)
    assert before is not None
    with caplog.at_level("WARNING"):
        metrics.add({**report, "pad_tokens": 3})
    assert REGISTRY.get_sample_value(name, labels) == before + 3
    assert REGISTRY.get_sample_value("vllm_spans_lookup_tokens_total", labels) == lookups
    assert "left out" in caplog.text
