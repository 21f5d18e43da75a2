"""What the fleet exporter costs: 500 engines with the page of a real one, at the default interval.

``python -m benchmarks.exporter_load`` writes ``benchmarks/results/exporter.json``. The engines are one process of
small servers; the exporter is a process of its own, as it is deployed, and only its processor time is counted. Its own
page is read once a cycle, as a Prometheus would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import say
from demo.server import free_port
from vllm_spans.exporter.service import Settings

RESULTS = Path(__file__).parent / "results" / "exporter.json"
PAGE = Path(__file__).parents[1] / "tests" / "exporter" / "engine_page.txt"
GOAL = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOKUP = b'vllm_spans_lookup_tokens_total{engine="0",model_name="tiny"} '
_REUSED = b'vllm_spans_reused_tokens_total{engine="0",model_name="tiny",tier="gpu"} '


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--cycles", type=int, default=6)
    args = parser.parse_args()
    result = measure(args.pods, args.cycles)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(json.dumps(result, indent=1))
    return 0 if result["cores"] <= GOAL else 1


def measure(pods: int, cycles: int) -> dict[str, Any]:
    """Processor time of an exporter over some cycles.

    Args:
        pods: Engines.
        cycles: Cycles measured, after one that is not.
    """
    interval = Settings().interval
    ours, theirs = multiprocessing.Pipe()
    servers = multiprocessing.Process(target=_serve, args=(pods, theirs), daemon=True)
    servers.start()
    try:
        addresses: list[str] = ours.recv()
        with tempfile.TemporaryDirectory() as folder:
            targets = Path(folder) / "targets.txt"
            targets.write_text("\n".join(addresses), encoding="utf-8")
            port = free_port()
            command = [sys.executable, "-m", "vllm_spans.cli", "exporter"]
            command += ["--targets-file", str(targets), "--listen", f"127.0.0.1:{port}"]
            exporter = subprocess.Popen(command)
            try:
                return _watch(exporter, f"http://127.0.0.1:{port}", pods, cycles, interval)
            finally:
                exporter.terminate()
                exporter.wait(30)
    finally:
        servers.kill()


def _watch(
    exporter: subprocess.Popen[bytes], url: str, pods: int, cycles: int, interval: float
) -> dict[str, Any]:
    while not _is_ready(url):
        time.sleep(0.2)
    time.sleep(interval / 2)  # halfway between two cycles
    spent, lengths, before = [], [], _cpu_seconds(exporter.pid)
    for _ in range(cycles):
        time.sleep(interval)
        page = httpx.get(f"{url}/metrics", timeout=30).text
        now = _cpu_seconds(exporter.pid)
        spent.append(now - before)
        before = now
        lengths.append(_value(page, "vllm_spans_exporter_last_cycle_seconds"))
        ready = _value(page, 'vllm_spans_fleet_pods{model="tiny",state="ready"}')
        ratio = _value(page, 'vllm_spans_fleet_reuse_ratio{model="tiny"}')
        if ready != pods or abs(ratio - 0.75) > 1e-9:
            raise RuntimeError(
                f"{ready:.0f} of {pods} pods are ready, their reuse ratio is {ratio}"
            )
    with open(f"/proc/{exporter.pid}/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    per_cycle = statistics.mean(spent)
    return {
        "pods": pods,
        "interval_s": interval,
        "page_bytes": PAGE.stat().st_size,
        "page_lines": PAGE.read_text(encoding="utf-8").count("\n"),
        "cycles": cycles,
        "cpu_s_per_cycle": round(per_cycle, 3),
        "cpu_s_of_the_worst_cycle": round(max(spent), 3),
        "cores": round(per_cycle / interval, 4),
        "goal_cores": GOAL,
        "cycle_s": round(statistics.median(lengths), 3),
        "resident_mib": round(resident / (1 << 20), 1),
        "cpus_of_the_machine": os.cpu_count(),
    }


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=30).status_code == 200
    return False


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _value(page: str, series: str) -> float:
    for line in page.splitlines():
        if line.startswith(f"{series} "):
            return float(line.rpartition(" ")[2])
    raise RuntimeError(f"the exporter's page has no {series}")


def _serve(pods: int, connection: Connection) -> None:
    """Servers whose counters grow with each answer: 1,024 tokens looked up, 768 reused."""
    page = PAGE.read_bytes()
    head, rest = page.split(_LOOKUP)
    middle, tail = rest.split(b"\n", 1)[1].split(_REUSED)
    tail = tail.split(b"\n", 1)[1]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            answers += 1
            done = answers // pods + 1
            counters = (b"%d\n" % (1024 * done), b"%d\n" % (768 * done))
            body = b"".join((head, _LOOKUP, counters[0], middle, _REUSED, counters[1], tail))
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=1.0.0\r\n"
                b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
            )
            await writer.drain()
        writer.close()

    async def serve() -> None:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(pods)]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        connection.send([f"http://127.0.0.1:{port}" for port in ports])
        await asyncio.Event().wait()

    answers = 0
    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
