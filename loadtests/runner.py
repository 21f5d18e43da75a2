"""One run of a workload against one server: starts the workers, watches them, and collects what they wrote.

Whatever ends the run (its own end, Ctrl-C, a worker that is killed), its files are read and a result is made of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from loadtests import counters, records
from loadtests.arrivals import Closed
from loadtests.job import JOB_VARIABLE, KEY_VARIABLE, WORKER_VARIABLE, Job
from loadtests.outcome import Outcome
from loadtests.records import Log, Record
from loadtests.stream import Limits
from loadtests.transport import Target
from loadtests.workloads import Plan, WorkloadError, planned

_LEAD = 0.5  # from "all are ready" to the start, in seconds
_READY_PATIENCE = 120.0
_STOP_PATIENCE = 15.0
_SAMPLE_SECONDS = 2.0
_ROOT = Path(__file__).resolve().parents[1]


class RunError(RuntimeError):
    """The run could not be started; the text says why."""


@dataclass
class Result:
    """What a run left.

    Attributes:
        name: The server's name in the report.
        job: The run.
        plan: Its workload.
        log: What the workers wrote; requests that were never sent are in it too.
        duration: Seconds from the start to the end.
        interrupted: Whether it was ended from outside.
        before: The server's counters before it.
        after: Those after it.
        samples: Those in between, with ``at``.
    """

    name: str
    job: Job
    plan: Plan
    log: Log
    duration: float
    interrupted: bool
    before: counters.Counters = field(default_factory=dict)
    after: counters.Counters = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def dead_workers(self) -> list[int]:
        """Workers that did not end by themselves although nobody ended the run."""
        if self.interrupted:
            return []
        return [n for n in range(self.job.workers) if n not in self.log.finished]


def find_model(url: str, api_key: str | None, patience: float = 0.0) -> str:
    """The first model that a server serves.

    Args:
        url: The server.
        api_key: Its key, if it wants one.
        patience: Seconds in which it may begin to answer.

    Raises:
        RunError: It does not answer.
    """
    base = Target(url).base
    request = urllib.request.Request(f"{base}/v1/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    deadline = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            if time.monotonic() >= deadline:
                raise RunError(f"{base}/v1/models does not name a model: {error}") from error
        time.sleep(1.0)


def run(
    name: str,
    workload: Path,
    data: Path | None,
    url: str,
    *,
    folder: Path,
    model: str | None = None,
    marked: bool = True,
    workers: int = 1,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    counted: bool = True,
    patience: float = 0.0,
) -> Result:
    """Run a workload against a server.

    Args:
        name: The server's name in the report.
        workload: The workload file.
        data: The file of a trace or of questions.
        url: The server.
        folder: Where raw records go; it must not hold an earlier run.
        model: The model's name; the server's first one when left out.
        marked: Whether spans are marked.
        workers: Processes.
        limits: How long answers may take.
        counted: Whether the server's counters are read and reconciled.
        patience: Seconds in which the server may begin to answer.

    Raises:
        RunError: The server or a worker could not be used from the start.
        WorkloadError: The workload is wrong.
    """
    api_key = os.environ.get(KEY_VARIABLE)
    if patience or not model:
        first = find_model(url, api_key, patience)
        model = model or first
    job = Job(
        str(workload.resolve()),
        None if data is None else str(data.resolve()),
        url,
        model,
        marked,
        workers,
        str(folder.resolve()),
        limits,
    )
    plan = job.plan()
    if isinstance(plan.arrivals, Closed) and plan.arrivals.users < workers:
        raise WorkloadError(
            f"arrivals.users is {plan.arrivals.users}, fewer than the {workers} workers; use --workers "
            f"{plan.arrivals.users}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if job.path.exists():
        raise RunError(f"{folder} holds an earlier run; name another folder with --out")
    job.save()

    base = Target(url).base
    before = counters.read(base) if counted else {}
    samples = folder / "counters.jsonl"
    writer = records.Writer(samples)
    processes = [_start_worker(job, index) for index in range(workers)]
    interrupted = threading.Event()
    try:
        with _on_signal(interrupted):
            _wait_ready(job, processes, interrupted)
            start = time.monotonic() + _LEAD
            _replace(job.start_path, json.dumps({"start": start}))
            sampler = counters.Sampler(base, _SAMPLE_SECONDS, writer.write, start)
            if counted:
                sampler.start()
            while any(process.poll() is None for process in processes):
                if interrupted.wait(0.1):
                    break
            end = time.monotonic()
            _stop(processes)
            if counted:
                sampler.stop()
    finally:
        _stop(processes)
        writer.close()
    log = records.read(job.records_path(index) for index in range(workers))
    _add_unsent(log, plan)
    after = counters.read_idle(base) if counted else {}
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    result = Result(name, job, plan, log, end - start, interrupted.is_set(), before, after, lines)
    save_end(result)
    return result


def _start_worker(job: Job, index: int) -> subprocess.Popen[bytes]:
    users = 1
    arrivals = job.plan().arrivals
    if isinstance(arrivals, Closed):
        users = len(range(index, arrivals.users, job.workers))
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--headless", "--users", str(users), "--spawn-rate", str(users)]
    command += ["--stop-timeout", "0", "--only-summary", "--loglevel", "WARNING"]
    environ = {**os.environ, JOB_VARIABLE: str(job.path), WORKER_VARIABLE: str(index)}
    environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    with job.log_path(index).open("wb") as log:
        # A session of its own: Ctrl-C reaches this process, which ends the workers in order.
        return subprocess.Popen(
            command,
            cwd=job.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_ready(
    job: Job, processes: list[subprocess.Popen[bytes]], interrupted: threading.Event
) -> None:
    deadline = time.monotonic() + _READY_PATIENCE
    waiting = set(range(job.workers))
    while waiting:
        for index in list(waiting):
            path = job.records_path(index)
            if path.exists() and path.read_bytes().endswith(b"\n"):
                waiting.remove(index)
            elif processes[index].poll() is not None or time.monotonic() > deadline:
                tail = job.log_path(index).read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RunError(f"worker {index} did not get ready\n{tail}")
        if interrupted.wait(0.05):
            raise RunError("interrupted before the start")


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the workers politely, then for good; those that have ended are left alone."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_PATIENCE
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _on_signal(event: threading.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set an event, so that the run ends with its report."""

    def note(signum: int, frame: FrameType | None) -> None:
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _add_unsent(log: Log, plan: Plan) -> None:
    """Add what was planned and never sent. In a closed loop nothing is planned beyond what was sent."""
    known = {(record.session, record.turn) for record in log.records}
    starts = (
        {record.session: (record.planned, record.stage) for record in log.records}
        if isinstance(plan.arrivals, Closed)
        else {number: (arrival.at, arrival.stage) for number, arrival in planned(plan)}
    )
    for number, (at, stage) in starts.items():
        for turn in range(len(plan.workload.session(number).turns)):
            if (number, turn) not in known:
                log.records.append(Record(number, turn, stage, at, Outcome.NOT_SENT))
    log.records.sort(key=lambda record: (record.planned, record.session, record.turn))


def save_end(result: Result) -> None:
    """Write what the workers' files do not say beside them, for ``load_result``."""
    end = {
        "name": result.name,
        "duration": result.duration,
        "interrupted": result.interrupted,
        "before": dict(result.before),
        "after": dict(result.after),
    }
    _replace(Path(result.job.folder) / "end.json", json.dumps(end, indent=1) + "\n")


def load_result(folder: Path) -> Result:
    """Make a result of a run's files alone, also of a run whose own process was killed.

    Args:
        folder: The run's folder.

    Raises:
        RunError: It holds no run.
    """
    try:
        job = dataclasses.replace(Job.read(folder / "job.json"), folder=str(folder))
    except OSError as error:
        raise RunError(f"{folder} holds no run: {error}") from error
    plan = job.plan()
    paths = [job.records_path(index) for index in range(job.workers)]
    log = records.read(path for path in paths if path.exists())
    _add_unsent(log, plan)
    samples = folder / "counters.jsonl"
    text = samples.read_text(encoding="utf-8") if samples.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    try:
        end = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    except OSError:
        ends = [r.sent + r.e2e for r in log.records if r.sent is not None and r.e2e is not None]
        end = {"name": folder.name, "duration": max(ends, default=0.0), "interrupted": True}
    return Result(job=job, plan=plan, log=log, samples=lines, **end)
