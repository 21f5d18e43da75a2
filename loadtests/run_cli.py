"""The commands that send requests: ``run``, ``compare`` and ``report``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtests import report
from loadtests.runner import Result, load_result, run
from loadtests.servers import start_server
from loadtests.stream import Limits
from loadtests.summary import Bounds, Slo
from loadtests.verdict import Status, Verdict, judge


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the three commands."""
    one = commands.add_parser("run", help="run a workload against a server")
    one.add_argument("--url", required=True, help="the server")
    one.add_argument("--name", default="server", help="its name in the report")
    one.add_argument("--plain", action="store_true", help="mark no spans")
    _add_run(one)
    one.set_defaults(run=_run)
    two = commands.add_parser(
        "compare", help="run the same schedule against stock vLLM and spans, one after the other"
    )
    for name in ("stock", "spans"):
        two.add_argument(
            f"--{name}",
            metavar="URL",
            help="the server; left out: the embedded model is served on this machine's CPU",
        )
    two.add_argument("--mark-both", action="store_true", help="mark spans for --stock too")
    _add_run(two)
    two.set_defaults(run=_compare)
    again = commands.add_parser("report", help="make the report of runs again from their records")
    again.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run's folder")
    again.add_argument("--out", type=Path, required=True, help="where the report goes")
    _add_bounds(again)
    again.set_defaults(run=_report)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", type=Path, help="a workload file")
    parser.add_argument("--data", type=Path, help="the file of a trace or of questions")
    parser.add_argument(
        "--out", type=Path, help="folder of records and report (default: a new one)"
    )
    parser.add_argument("--model", help="the model's name (default: the server's first one)")
    parser.add_argument("--workers", type=int, default=1, help="generator processes (default: 1)")
    parser.add_argument(
        "--no-counters",
        dest="counted",
        action="store_false",
        help="read no counters: several servers answer at the address, and /metrics would be any one's",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds in which the server may begin to answer (default: it has to answer at once)",
    )
    limits = Limits()
    for name, default, text in (
        ("first-token", limits.first_token, "the first visible token"),
        ("stall", limits.stall, "the next one"),
        ("total", limits.total, "the whole answer"),
    ):
        parser.add_argument(
            f"--{name}-limit",
            type=float,
            default=default,
            metavar="S",
            help=f"seconds to wait for {text} (default: {default:g})",
        )
    _add_bounds(parser)


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    slo = parser.add_argument_group("the objective; without bounds every whole answer keeps it")
    slo.add_argument("--ttft", type=float, metavar="S", help="most seconds to the first token")
    slo.add_argument("--tpot", type=float, metavar="S", help="most seconds per further token")
    slo.add_argument("--e2e", type=float, metavar="S", help="most seconds to the end")
    slo.add_argument(
        "--share",
        type=float,
        default=Slo().share,
        help="least share of requests that keep them",
    )
    slo.add_argument("--knee", type=float, default=0.0, help="least knee of a ramp, sessions/s")
    bounds = Bounds()
    own = parser.add_argument_group("the generator; beyond these bounds the run is invalid")
    own.add_argument("--max-delay", type=float, default=bounds.delay, metavar="S")
    own.add_argument("--max-lag", type=float, default=bounds.lag, metavar="S")
    own.add_argument("--max-cpu", type=float, default=bounds.cpu, metavar="SHARE")


@dataclass(frozen=True)
class _Server:
    name: str
    url: str | None
    marked: bool


def _run(options: argparse.Namespace) -> int:
    server = _Server(options.name, options.url, not options.plain)
    return _run_all([server], options)


def _compare(options: argparse.Namespace) -> int:
    servers = [
        _Server("stock", options.stock, options.mark_both),
        _Server("spans", options.spans, True),
    ]
    return _run_all(servers, options)


def _run_all(servers: list[_Server], options: argparse.Namespace) -> int:
    out = options.out or _new_folder(options.workload.stem)
    limits = Limits(options.first_token_limit, options.stall_limit, options.total_limit)
    results: list[Result] = []
    for server in servers:
        folder = out / server.name
        with _serving(server, folder) as url:
            print(f"{server.name}: {url}", flush=True)
            result = run(
                server.name,
                options.workload,
                options.data,
                url,
                folder=folder,
                model=options.model,
                marked=server.marked,
                workers=options.workers,
                limits=limits,
                counted=options.counted,
                patience=options.wait,
            )
        results.append(result)
        if result.interrupted:
            break
    return _finish(results, out, options)


def _report(options: argparse.Namespace) -> int:
    return _finish([load_result(folder) for folder in options.folders], options.out, options)


def _finish(results: list[Result], out: Path, options: argparse.Namespace) -> int:
    slo = Slo(options.ttft, options.tpot, options.e2e, options.share)
    bounds = Bounds(options.max_delay, options.max_lag, options.max_cpu)
    verdicts = [judge(result, slo, bounds, options.knee) for result in results]
    path = report.write(verdicts, slo, out)
    for verdict in verdicts:
        for line in _lines(verdict):
            print(line)
    print(f"report: {path}")
    return status(verdicts)


def status(verdicts: list[Verdict]) -> int:
    """The exit status of several runs.

    A run that was ended or is invalid decides first. The objective is that of the last server: the first one of a
    comparison is what it is compared with. Failed requests and wrong counts count everywhere.
    """
    found = [verdict.status for verdict in verdicts]
    for worst in (Status.INTERRUPTED, Status.INVALID):
        if worst in found:
            return int(worst)
    others = [
        v for v in verdicts[:-1] if v.summary["failed"] or not all(c.agrees for c in v.checks)
    ]
    return int(Status.MISSED if others else found[-1])


def _lines(verdict: Verdict) -> Iterator[str]:
    found = verdict.summary
    ttft, e2e = found["ttft"], found["e2e"]
    yield (
        f"{verdict.result.name}: {verdict.status.name}, {found['requests']} requests, {found['failed']} failed, "
        f"{found['requests_per_second']:.3g}/s, {found['output_tokens_per_second']:.3g} tokens/s"
    )
    if ttft["count"]:
        yield (
            f"  TTFT p50 {ttft['p50']:.3f} s, p95 {ttft['p95']:.3f} s; E2E p50 {e2e['p50']:.3f} s, p95 "
            f"{e2e['p95']:.3f} s"
        )
    if not verdict.checks:
        yield "  no counters were read, so nothing was reconciled"
    for text in (*verdict.invalid, *verdict.missed):
        yield f"  {text}"


@contextlib.contextmanager
def _serving(server: _Server, folder: Path) -> Iterator[str]:
    if server.url is not None:
        yield server.url
        return
    with start_server(server.name == "spans", folder.with_suffix(".log")) as url:
        yield url


def _new_folder(name: str) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("loadtest-results") / f"{now}-{name}"
