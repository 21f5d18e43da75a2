"""What a dashboard holds, and how it becomes Grafana's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

_DATASOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
TOKENS = "suffix: tokens/s"


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL with the dashboard's variables.
        legend: Grafana's legend format.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: Its title.
        question: What it answers; shown as its description.
        queries: What it shows.
        unit: Grafana's name of the unit.
        kind: ``lines``, ``stacked``, ``number`` or ``table``.
        width: Of 24 columns.
        most: Upper end of the axis.
    """

    title: str
    question: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "lines"
    width: int = 12
    most: float | None = None


@dataclass(frozen=True)
class Variable:
    """A choice of label values, several at once.

    Attributes:
        name: Name in queries.
        label: What Grafana calls it.
        query: ``label_values(…)``.
    """

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Section:
    """A row with its panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard.

    Attributes:
        uid: Its name in URLs and files.
        title: Its title.
        description: What it is for.
        variables: Besides the data source.
        sections: Its rows.
    """

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    sections: tuple[Section, ...]


def to_json(board: Board) -> str:
    """Grafana's JSON of a dashboard; the same text for the same dashboard."""
    dashboard = (
        Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["vllm", "vllm-spans"])
        .timezone("browser")
        .refresh("30s")
        .time("now-6h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        dashboard.with_variable(_variable(variable))
    for section in board.sections:
        dashboard.with_row(Row(section.title))
        for panel in section.panels:
            dashboard.with_panel(_panel(panel))
    tree = json.loads(JSONEncoder(sort_keys=True).encode(dashboard.build()))
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(variable: Variable) -> QueryVariable:
    return (
        QueryVariable(variable.name)
        .label(variable.label)
        .datasource(_DATASOURCE)
        .query(variable.query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel) -> Any:
    builder = {"number": _number, "table": _table}.get(panel.kind, _lines)(panel)
    builder.title(panel.title).description(panel.question).datasource(_DATASOURCE)
    builder.unit(panel.unit).span(panel.width).height(_height(panel))
    if panel.kind != "table":
        builder.min(0)
    if panel.most is not None:
        builder.max(panel.most)
    for query, name in zip(panel.queries, _names(panel.queries), strict=True):
        target = Dataquery().expr(query.expr).ref_id(name).datasource(_DATASOURCE)
        if query.legend:
            target.legend_format(query.legend)
        if panel.kind == "lines" or panel.kind == "stacked":
            target.range()
        else:
            target.instant()
        if panel.kind == "table":
            target.format(PromQueryFormat.TABLE)
        builder.with_target(target)
    return builder


def _height(panel: Panel) -> int:
    if panel.kind == "number":
        return 4
    return 5 if panel.width == 24 else 8


def _names(queries: Sequence[Query]) -> list[str]:
    return [chr(ord("A") + index) for index in range(len(queries))]


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = panel.kind == "stacked"
    legend = common.VizLegendOptions().placement(LegendPlacement.BOTTOM)
    builder = (
        timeseries.Panel()
        .draw_style(GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(30 if stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .legend(legend.display_mode(LegendDisplayMode.LIST).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if stacked:
        builder.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return builder


def _number(panel: Panel) -> stat.Panel:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _table(panel: Panel) -> table.Panel:
    hide = {"excludeByName": {"Time": True, "__name__": True, "job": True}}
    return table.Panel().with_transformation(DataTransformerConfig("organize", hide))
