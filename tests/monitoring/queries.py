"""All queries of dashboards and rules, and what metrics they are of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import promql_parser as ql
import yaml

from tests.engine.harness import ROOT

RULES = ROOT / "monitoring" / "rules"
DASHBOARDS = ROOT / "monitoring" / "dashboards" / "json"
VARIABLES = {"$__rate_interval": "10s", "$model": ".*", "$pod": ".*"}
_COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


@dataclass(frozen=True)
class QueryOf:
    """A query and where it stands.

    Attributes:
        where: File, and panel or rule.
        expr: As it stands there.
        legend: Grafana's legend format, of a panel.
    """

    where: str
    expr: str
    legend: str = ""


def dashboard_queries(paths: Sequence[Path] = ()) -> list[QueryOf]:
    """Every query of every panel."""
    found = []
    for path in paths or sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                where = f"{path.stem}: {panel['title']}"
                found.append(QueryOf(where, target["expr"], target.get("legendFormat", "")))
    return found


def rule_queries(kind: str) -> list[QueryOf]:
    """Every expression of rules of a kind, ``alert`` or ``record``."""
    return [
        QueryOf(f"{path.name}: {rule[kind]}", rule["expr"])
        for path in sorted(RULES.glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if kind in rule
    ]


def fill_in(expr: str) -> str:
    """A dashboard's query with all of everything chosen."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def hasten(text: str) -> str:
    """Shorten ranges and offsets, so that a minute of traffic is enough: at most 30 s, and 5 s back."""
    text = re.sub(r"\[1d\]", "[30s]", text)
    text = re.sub(r"\[\d+[mh]\]", "[15s]", text)
    return re.sub(r"offset \d+[mh]", "offset 5s", text)


def metrics(expr: str) -> set[str]:
    """Names of all metrics in an expression."""
    return {node.name for node in nodes(ql.parse(expr)) if isinstance(node, ql.VectorSelector)}


def nodes(node: ql.Expr) -> Iterator[ql.Expr]:
    """An expression and all that it is made of."""
    yield node
    for child in _children(node):
        yield from nodes(child)


def _children(node: ql.Expr) -> list[ql.Expr]:
    if isinstance(node, ql.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, ql.Call):
        return list(node.args)
    if isinstance(node, ql.MatrixSelector):
        return [node.vector_selector]
    children = [getattr(node, name, None) for name in ("expr", "param")]
    return [child for child in children if isinstance(child, ql.Expr)]


def without_thresholds(expr: str) -> list[str]:
    """What an alert compares, each part of which must have data for the alert to be able to fire.

    ``a > 1 and b`` is made of ``a`` and ``b``; ``absent(a)`` of ``a``; ``a unless b > 0`` of ``a`` and ``b``. What is
    compared inside a ratio stays as it is.
    """
    return list(_parts(ql.parse(expr)))


def _parts(node: ql.Expr) -> Iterator[str]:
    if isinstance(node, ql.ParenExpr):
        yield from _parts(node.expr)
    elif isinstance(node, ql.BinaryExpr) and str(node.op) in {*_COMPARISONS, "and", "unless", "or"}:
        yield from _parts(node.lhs)
        yield from _parts(node.rhs)
    elif isinstance(node, ql.Call) and node.func.name == "absent":
        yield from _parts(node.args[0])
    elif any(isinstance(part, ql.VectorSelector) for part in nodes(node)):
        yield node.prettify()
