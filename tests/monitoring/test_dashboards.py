"""Prevents: checked-in dashboards that are not what the code makes, or that ask one Prometheus only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import promql_parser
import pytest

from monitoring.dashboards.__main__ import BOARDS, FOLDER
from monitoring.dashboards.panels import to_json
from tests.engine.harness import ROOT
from tests.monitoring.queries import dashboard_queries, fill_in

FILES = sorted(FOLDER.glob("*.json"))


def test_the_checked_in_files_are_what_the_code_makes() -> None:
    """In another process with other hash seeds as well: run `make dashboards` if it is not so."""
    assert {path.stem for path in FILES} == {board.uid for board in BOARDS}
    code = (
        "from monitoring.dashboards.__main__ import *; print(''.join(map(to_json, BOARDS)), end='')"
    )
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        made = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, check=True
        ).stdout.decode()
        assert made == "".join((FOLDER / f"{b.uid}.json").read_text() for b in BOARDS)
    assert made == "".join(map(to_json, BOARDS))


def panels(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in tree["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path: Any) -> None:
    """Every panel asks the chosen data source, says what it answers, and has a place of its own."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    variables = {v["name"]: v for v in tree["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"datasource", "model"} <= variables.keys()
    cells: set[tuple[int, int]] = set()
    for panel in panels(tree):
        name = panel["title"]
        assert panel["description"].rstrip().endswith(("?", ".")), name
        assert panel["datasource"]["uid"] == "$datasource", name
        assert panel["targets"], name
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "$datasource", name
            promql_parser.parse(fill_in(target["expr"]))
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not mine & cells, name
        cells |= mine
    used = "".join(query.expr for query in dashboard_queries([path]))
    for variable in variables.values():
        used += str(variable.get("query", ""))
    for name in variables.keys() - {"datasource"}:
        assert f"${name}" in used, name
