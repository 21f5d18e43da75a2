"""``vllm-spans exporter``: its arguments, its log, and its end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

from vllm_spans.exporter.fleet import Limits
from vllm_spans.exporter.kube import KubernetesSource
from vllm_spans.exporter.service import Exporter, Settings
from vllm_spans.exporter.sources_cli import (
    add_source_arguments,
    count,
    make_source,
    seconds,
)
from vllm_spans.exporter.targets import Source, TargetError
from vllm_spans.exporter.web import ListenError, serve

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9405

_DESCRIPTION = """\
Scrape all engine pods and export what they say together: per model how much is reused and how
much is recomputed, pods by state, the spans asked for most, and how far pods differ.

Pods are found by watching a Kubernetes API server (the rights to list and watch pods of one
namespace are enough), or named one by one.
"""

_EPILOG = """\
/metrics shows the fleet, /healthz that the process lives, /readyz that the first cycle is done.
docs/exporter.md says what each metric answers and which rights the service account needs.

examples:
  vllm-spans exporter --namespace llm
      Watch the pods labelled app.kubernetes.io/name=vllm-spans in one namespace.
  vllm-spans exporter --all-namespaces --selector 'app in (chat, rag)' --port-name metrics
      Watch other pods, everywhere; their page is on the container port named `metrics`.
  vllm-spans exporter --target http://gpu-1:8000 --target http://gpu-2:8000
      Two servers, without Kubernetes.
  vllm-spans exporter --targets-file servers.txt --interval 5 --window 60 --listen 127.0.0.1:9405
      Servers from a file that may change; ratios of the last minute.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: The command's parser.
    """
    defaults = Settings()
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_source_arguments(parser)
    work = parser.add_argument_group("how")
    work.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        default=("0.0.0.0", DEFAULT_PORT),
        help=f"where to serve the metrics (default: 0.0.0.0:{DEFAULT_PORT})",
    )
    work.add_argument(
        "--interval",
        type=seconds,
        metavar="SECONDS",
        default=defaults.interval,
        help="time between two scrapes of a pod (default: %(default)g)",
    )
    work.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        default=defaults.timeout,
        help="longest that a scrape may take, less than the interval (default: %(default)g)",
    )
    work.add_argument(
        "--window",
        type=seconds,
        metavar="SECONDS",
        default=defaults.limits.window,
        help="ratios are those of this last time (default: %(default)g)",
    )
    work.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        default=defaults.concurrency,
        help="scrapes at a time (default: %(default)d)",
    )
    work.add_argument(
        "--hot-spans",
        type=count,
        metavar="N",
        default=defaults.limits.hot_spans,
        help="spans asked for most to export of each model (default: %(default)d)",
    )
    work.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least serious lines to write (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the command.

    Args:
        args: Parsed arguments of ``add_arguments``.

    Returns:
        The exit code: 0 after a signal to end, 2 when it cannot start.
    """
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each scrape otherwise
    try:
        if args.timeout >= args.interval:
            raise TargetError("--timeout must be less than --interval")
        if args.window < 2 * args.interval:
            raise TargetError(
                "--window must be at least twice --interval, or it holds no increment"
            )
        exporter = Exporter(_settings(args))
        metrics = exporter.metrics
        source = make_source(
            args,
            on_event=lambda kind: metrics.watch_events.labels(kind).inc(),
            on_failure=lambda reason: metrics.watch_failures.labels(reason).inc(),
        )
        if isinstance(source, KubernetesSource):
            metrics.watch(exporter.registry, lambda: source.connected)
        host, port = args.listen
        with serve(host, port, exporter.registry, exporter.not_ready) as listening:
            logger.info("serving the fleet's metrics on %s:%d", host, listening)
            asyncio.run(_run(exporter, source))
    except (TargetError, ListenError) as error:
        sys.stderr.write(f"vllm-spans exporter: {error}\n")
        return 2
    logger.info("ended")
    return 0


async def _run(exporter: Exporter, source: Source) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await exporter.run(source, stop)


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        interval=args.interval,
        timeout=args.timeout,
        concurrency=args.concurrency,
        limits=Limits(window=args.window, hot_spans=args.hot_spans),
    )


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)
