"""Names of the metrics that a real engine has."""

from __future__ import annotations

from functools import cache

from tests.charts.rendering import ROOT


@cache
def exported() -> frozenset[str]:
    """Names in the page that was captured from an engine, as written and as Prometheus 2.x may see them."""
    page = (ROOT / "tests" / "exporter" / "engine_page.txt").read_text(encoding="utf-8")
    names = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line[:1] != "#"}
    return frozenset(names | {name.replace(":", "_") for name in names})
