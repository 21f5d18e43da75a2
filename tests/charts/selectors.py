"""Selectors of the last release: ``python -m tests.charts.selectors`` notes those of this chart when it is released.

A Deployment's selector cannot be changed: an upgrade over a changed one fails, and the way out is to delete what
serves. Those of Services, monitors and pools could be, but would lose the pods of the old version in the rollout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.charts.golden import name_of
from tests.charts.rendering import CHART, PRESETS, ROOT, render

RELEASED = Path(__file__).with_name("released_selectors.yaml")


def selector_of(thing: dict[str, Any]) -> dict[str, Any] | None:
    """The labels that an object chooses pods or Services by, if it chooses any."""
    spec = thing.get("spec") or {}
    selector = spec.get("podSelector" if thing["kind"] == "NetworkPolicy" else "selector")
    if selector is None:
        return None
    return selector.get("matchLabels", selector)


def selectors() -> dict[str, dict[str, dict[str, Any]]]:
    """Selector by preset and object."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for preset in PRESETS:
        of_preset = found.setdefault(name_of(preset), {})
        for thing in render(preset=preset).objects:
            selector = selector_of(thing)
            if selector is not None:
                of_preset[f"{thing['kind']}/{thing['metadata']['name']}"] = selector
    return found


def main() -> None:
    """Write the file."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    text = (
        "# Written by `python -m tests.charts.selectors` at a release. Change it by hand never: what stands here runs\n"
        "# somewhere, and the chart must go on choosing it.\n"
        + yaml.safe_dump({"chart": chart["version"], "selectors": selectors()}, width=100)
    )
    RELEASED.write_text(text, encoding="utf-8")
    print(RELEASED.relative_to(ROOT))


if __name__ == "__main__":
    main()
