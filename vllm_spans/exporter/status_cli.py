"""``vllm-spans status``: asks an exporter, or looks at the pods itself, and prints what it sees."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import sys
import time

import httpx

from vllm_spans.exporter.cli import DEFAULT_PORT
from vllm_spans.exporter.fleet import FleetView, Limits
from vllm_spans.exporter.service import Exporter, Settings
from vllm_spans.exporter.sources_cli import (
    add_source_arguments,
    has_cluster_arguments,
    has_static_targets,
    make_source,
    seconds,
)
from vllm_spans.exporter.status import StatusError, as_json, as_text, read_view
from vllm_spans.exporter.targets import Source, TargetError

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
LIST_SECONDS = 15.0
_OF_WINDOW = "in the exporter's window"
_OF_ALL = "since the pods started"

_DESCRIPTION = """\
Show the fleet in the terminal: per model its pods by state, how much is reused and recomputed,
tokens by tier, failures, and the spans asked for most.

Without arguments an exporter on this machine is asked. With any argument that names servers or
chooses pods of a cluster these are asked themselves; ratios and counters are then of all that they
did since they started.
"""

_EPILOG = """\
exit status: 0, or 1 when there is nothing to show (why is said), 130 after Ctrl-C

examples:
  vllm-spans status --url http://spans-exporter:9405
  vllm-spans status --target http://gpu-1:8000 --target http://gpu-2:8000
  vllm-spans status --namespace llm --watch 5
      Ask the pods of a namespace again every five seconds.
  vllm-spans status --json | jq '.models[].reuse_ratio'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: The command's parser.
    """
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "--url", metavar="URL", help=f"address of an exporter (default: {DEFAULT_URL})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    parser.add_argument(
        "--watch", type=seconds, metavar="SECONDS", help="show it again and again, until Ctrl-C"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        default=Settings().timeout,
        help="longest to wait for an answer (default: %(default)g)",
    )
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command.

    Args:
        args: Parsed arguments of ``add_arguments``.

    Returns:
        The exit code: 0, or 1 when there is nothing to show.
    """
    logging.getLogger("vllm_spans").addHandler(
        logging.NullHandler()
    )  # it prints what it has to say
    direct = has_static_targets(args) or has_cluster_arguments(args)
    try:
        if direct and args.url:
            raise StatusError("give either --url or pods to ask")
        source = _start(args) if direct else None
        while True:
            try:
                view = _look(source, args.timeout) if source else _ask(args.url, args.timeout)
                _show(view, _OF_ALL if source else _OF_WINDOW, args)
            except StatusError as error:
                if not args.watch:
                    raise
                sys.stderr.write(f"vllm-spans status: {error}\n")
            if not args.watch:
                return 0
            time.sleep(args.watch)
    except (StatusError, TargetError) as error:
        sys.stderr.write(f"vllm-spans status: {error}\n")
        return 1


def _ask(url: str | None, timeout: float) -> FleetView:
    address = (url or DEFAULT_URL).rstrip("/")
    try:
        answer = httpx.get(f"{address}/metrics", timeout=timeout, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "" if url else "; give --url, or pods to ask (--target, --namespace)"
        raise StatusError(f"no answer from an exporter at {address}: {error}{hint}") from error
    return read_view(answer.text)


def _start(args: argparse.Namespace) -> Source:
    source = make_source(args, on_event=lambda kind: None, on_failure=lambda reason: None)
    source.start()
    deadline = time.monotonic() + LIST_SECONDS
    # The first failure is told at once: a user who waits wants to know why.
    while problem := source.problem():
        if "cannot be listed" in problem or time.monotonic() > deadline:
            raise StatusError(problem)
        time.sleep(0.05)
    return source


def _look(source: Source, timeout: float) -> FleetView:
    settings = Settings(timeout=timeout, limits=Limits(window=math.inf))
    exporter = Exporter(settings, watching_since=-math.inf)
    asyncio.run(exporter.run_once(source))
    return exporter.view()


def _show(view: FleetView, window: str, args: argparse.Namespace) -> None:
    if args.json:
        text = json.dumps(as_json(view, window), indent=None if args.watch else 2)
    else:
        text = as_text(view, window)
        if args.watch:
            text = f"{time.strftime('%H:%M:%S')}\n{text}\n"
            if sys.stdout.isatty():
                text = f"\033[H\033[2J{text}"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
