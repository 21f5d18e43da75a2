"""The report of one or two runs: HTML with plots, JSON, and a CSV of every request."""

from __future__ import annotations

import csv
import dataclasses
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtests.plots import Plot, all_plots
from loadtests.records import Record
from loadtests.summary import Slo
from loadtests.verdict import Verdict, compare, pairs

_COLUMNS = [field.name for field in dataclasses.fields(Record) if field.name != "gaps"]
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #1c1c1c }
table { border-collapse: collapse; margin: .6em 0 1.4em } th, td { padding: .25em .8em; text-align: right }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
.good { color: #1b7a3d } .bad { color: #b3261e; font-weight: 600 } svg { max-width: 100%; height: auto }
"""


def write(verdicts: Sequence[Verdict], slo: Slo, folder: Path) -> Path:
    """Write ``report.html``, its plots as SVG files, ``report.json`` and ``requests.csv``.

    Args:
        verdicts: One or more runs of one workload; the first two are compared.
        slo: The objective.
        folder: Where to.

    Returns:
        The path of the HTML file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = _content(verdicts, slo)
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["server", "id", *_COLUMNS, "delay"])
        for verdict in verdicts:
            for record in verdict.result.log.records:
                writer.writerow(_row(verdict.result.name, record))
    plots = list(all_plots(verdicts))
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(plot.svg + "\n", encoding="utf-8")
    path = folder / "report.html"
    path.write_text("\n".join(_page(content, plots)) + "\n", encoding="utf-8")
    return path


def _row(name: str, record: Record) -> list[Any]:
    values = [getattr(record, column) for column in _COLUMNS]
    values[_COLUMNS.index("outcome")] = record.outcome.value
    return [name, record.id, *values, record.delay]


def _content(verdicts: Sequence[Verdict], slo: Slo) -> dict[str, Any]:
    plan = verdicts[0].result.plan
    content: dict[str, Any] = {
        "workload": {"name": plan.name, **plan.settings},
        "slo": dataclasses.asdict(slo),
        "servers": [
            {
                "name": verdict.result.name,
                "model": verdict.result.job.model,
                "marked": verdict.result.job.marked,
                "workers": verdict.result.job.workers,
                "status": verdict.status.name,
                "invalid": verdict.invalid,
                "missed": verdict.missed,
                **verdict.summary,
                "reuse": verdict.reuse,
                "counters": [
                    {**dataclasses.asdict(check), "agrees": check.agrees}
                    for check in verdict.checks
                ],
            }
            for verdict in verdicts
        ],
    }
    if len(verdicts) > 1:
        first, second = (verdict.result.log.records for verdict in verdicts[:2])
        content["comparison"] = compare(pairs(first, second))
    return content


# -- HTML ---------------------------------------------------------------------------------------


def _page(content: dict[str, Any], plots: Sequence[Plot]) -> Iterator[str]:
    name = html.escape(content["workload"]["name"])
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load test: {name}</title>'
    yield f"<style>{_STYLE}</style><h1>Load test: {name}</h1>"
    for server in content["servers"]:
        yield f"<p><b>{html.escape(server['name'])}</b>: {_status(server)}</p>"
    yield _table(*_numbers(content["servers"]))
    if "comparison" in content:
        yield from _comparison(content)
    yield "<h2>Counted by client and server</h2>"
    yield _table(*_checks(content["servers"]))
    for plot in plots:
        yield f"<h2>{html.escape(plot.title)}</h2>{plot.svg}"
    yield "<h2>Settings</h2><pre>"
    yield html.escape(
        json.dumps({"workload": content["workload"], "slo": content["slo"]}, indent=1)
    )
    yield "</pre></html>"


def _status(server: dict[str, Any]) -> str:
    if server["status"] == "GOOD":
        return '<span class="good">the objective was kept</span>'
    reasons = server["invalid"] + server["missed"] or ["ended from outside"]
    return f'<span class="bad">{server["status"]}: {html.escape("; ".join(reasons))}</span>'


def _numbers(servers: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        ["requests", *(str(s["requests"]) for s in servers)],
        ["failed", *(str(s["failed"]) for s in servers)],
        ["seconds", *(_number(s["duration"]) for s in servers)],
        ["requests/s", *(_number(s["requests_per_second"]) for s in servers)],
        ["output tokens/s", *(_number(s["output_tokens_per_second"]) for s in servers)],
        ["kept the objective", *(_percent(s["goodput"]["share"]) for s in servers)],
        ["goodput, requests/s", *(_number(s["goodput"]["per_second"]) for s in servers)],
        ["knee, sessions/s", *(_number(s["knee"]) for s in servers)],
    ]
    for key, title in (
        ("ttft", "TTFT"),
        ("itl", "ITL"),
        ("tpot", "TPOT"),
        ("e2e", "E2E"),
        ("schedule_delay", "schedule delay"),
    ):
        for quantile in ("p50", "p95", "p99"):
            values = [s[key][quantile] for s in servers]
            texts = ["-" if value is None else _number(value * 1000) for value in values]
            rows.append([f"{title} {quantile}, ms", *texts])
    for key, title in (
        ("span_reuse", "span tokens reused"),
        ("gap_ratio", "gap tokens per reused span token"),
        ("prefix_hits", "prompt tokens found in the cache"),
    ):
        rows.append([title, *(_percent(s["reuse"][key]) for s in servers)])
    return ["", *(s["name"] for s in servers)], rows


def _comparison(content: dict[str, Any]) -> Iterator[str]:
    first, second = (server["name"] for server in content["servers"][:2])
    found = content["comparison"]
    yield f"<h2>{html.escape(first)} / {html.escape(second)}, request by request</h2>"
    more = found["prompt_tokens_more"]
    yield _table(
        ["", ""],
        [
            ["pairs answered by both", str(found["pairs"])],
            *([f"median ratio of {n.upper()}", _number(found[n])] for n in ("ttft", "tpot", "e2e")),
            [
                f"prompt tokens without pads that {first} has more: median, extreme",
                f"{_number(more['median'])}, {_number(more['max'])}",
            ],
            ["pairs with answers of another length", str(found["other_answer_lengths"])],
        ],
    )


def _checks(servers: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            f"{server['name']}: {check['what']}",
            _number(check["client"]),
            _number(check["server"]),
            "equal" if check["agrees"] else "DIFFERENT",
        ]
        for server in servers
        for check in server["counters"]
    ]
    return ["", "client", "server", ""], rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        cells = []
        for cell in row:
            mark = ' class="bad"' if cell == "DIFFERENT" else ""
            cells.append(f"<td{mark}>{html.escape(cell)}</td>")
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "<table>" + "".join(lines) + "</table>"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
