"""``python -m loadtests``: look at workloads, run them, compare servers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.server import ServerError
from loadtests import fake_server, run_cli
from loadtests.dry_run import CHARACTERS, describe, requests, tokens_of
from loadtests.runner import RunError
from loadtests.workloads import WorkloadError, load

_DRY_SESSIONS = 200


def _dry_run(options: argparse.Namespace) -> int:
    plan = load(options.workload, options.data)
    counting = CHARACTERS if options.tokenizer is None else tokens_of(options.tokenizer)
    limit = options.sessions
    if limit is None and getattr(plan.arrivals, "sessions", 0) is None:
        limit = _DRY_SESSIONS
    for line in describe(plan, list(requests(plan, limit)), counting, options.show):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    dry = commands.add_parser(
        "dry-run", help="print what would be sent and the best possible reuse"
    )
    dry.add_argument("workload", type=Path, help="a workload file")
    dry.add_argument("--data", type=Path, help="the file of a trace or of questions")
    dry.add_argument("--sessions", type=int, help="look at this many sessions only")
    dry.add_argument("--show", type=int, default=3, help="print this many requests (default: 3)")
    dry.add_argument("--tokenizer", help="count tokens of this tokenizer.json, not characters")
    dry.set_defaults(run=_dry_run)
    run_cli.add_commands(commands)
    fake = commands.add_parser("fake-server", help="a server whose every latency is known")
    fake_server.add_arguments(fake)
    fake.set_defaults(run=fake_server.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (WorkloadError, RunError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
