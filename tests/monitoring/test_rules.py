"""Prevents: an alert that never fires, fires for nothing, or sends somebody to a runbook that says nothing of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.harness import ROOT
from tests.monitoring.tools import promtool

RULES = ROOT / "monitoring" / "rules"
CASES = sorted((Path(__file__).parent / "rules").glob("*.yaml"))


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind, ``alert`` or ``record``."""
    return [
        rule
        for path in sorted(RULES.glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if kind in rule
    ]


@pytest.mark.monitoring
def test_promtool_accepts_the_rules() -> None:
    promtool(
        "check", "rules", "--lint=all", "--lint-fatal", *map(str, sorted(RULES.glob("*.yaml")))
    )


@pytest.mark.monitoring
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_rules_do_what_their_cases_say(path: Path) -> None:
    promtool("test", "rules", str(path))


def test_every_rule_has_cases() -> None:
    """Each alert is seen to fire in one case and to be silent in another; each recording is used or tested."""
    fires: set[str] = set()
    silent: set[str] = set()
    text = "".join(path.read_text(encoding="utf-8") for path in [*CASES, RULES / "alerts.yaml"])
    for path in CASES:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for case in test["promql_expr_test"]:
                if not case["expr"].startswith("ALERTS{"):
                    continue
                names = set(re.findall(r"VllmSpans\w+", case["expr"]))
                (fires if case["exp_samples"] else silent).update(names)
    alerts = {rule["alert"] for rule in rules("alert")}
    assert fires == alerts
    assert silent == alerts
    for rule in rules("record"):
        assert rule["record"] in text, rule["record"]


def test_every_alert_has_its_section_in_the_runbook() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    alerts = rules("alert")
    assert sections.keys() == {rule["alert"] for rule in alerts}
    for name, section in sections.items():
        for part in ("**Meaning.**", "**Look.**", "**Do.**"):
            assert part in section, f"{name} lacks {part}"
    for rule in alerts:
        name, notes = rule["alert"], rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert notes["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert notes["summary"] and notes["description"], name
