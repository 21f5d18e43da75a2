"""Prevents a load generator that measures itself, and a run that leaves no report because it ended badly.

Real processes of locust against a fake server in a process of its own. Nothing is asserted about how fast anything is:
what was measured is judged against the server's own record on the same clock, and what the machine adds to any
client at that moment is measured beside it by the simplest client there can be.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from demo.server import free_port
from loadtests.outcome import Outcome
from loadtests.runner import Result, RunError, load_result, run
from loadtests.summary import Bounds, Slo
from loadtests.verdict import Status, judge
from loadtests.workloads import WorkloadError
from tests.loadtests.control import Control
from tests.loadtests.fake import FakeProcess

PATIENCE = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[FakeProcess]:
    with FakeProcess() as process:
        yield process


def workload(folder: Path, plan: dict[str, Any], arrivals: str, kind: str = "plain") -> Path:
    """A workload file whose requests carry a plan."""
    tables = {
        "plain": "length = 20",
        "conversation": "count = 9\nlength = 9\nturns = 3\nthink_seconds = 0.01",
    }
    values = "\n".join(f"{name} = {json.dumps(value)}" for name, value in plan.items())
    path = folder / "workload.toml"
    path.write_text(
        f'kind = "{kind}"\n[{kind}]\n{tables[kind]}\n[body.fake_plan]\n{values}\n[arrivals]\n{arrivals}\n'
    )
    return path


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def answered(folder: Path, worker: int) -> int:
    """Lines about sent requests that a worker has written."""
    path = folder / f"records-{worker}.jsonl"
    return path.read_bytes().count(b'"sent"') if path.exists() else 0


def ended(folder: Path, workers: int) -> bool:
    """Whether every worker has sent all that it had to send."""
    paths = [folder / f"records-{worker}.jsonl" for worker in range(workers)]
    return all(path.exists() and b'"end"' in path.read_bytes() for path in paths)


ATTEMPTS = 3


def errors_of(server: FakeProcess, folder: Path) -> list[tuple[str, float, float]]:
    """Median errors of a run at 50 requests/s, each with its bound."""
    plan = {"first_delay": 0.1, "token_gap": 0.02, "tokens": 12, "comment_every": 0.03}
    folder.mkdir()
    file = workload(folder, plan, 'kind = "poisson"\nrate = 50\nduration = 4')
    with Control(server.url, plan, lambda: ended(folder / "run", 2)) as control:
        result = run("fake", file, None, server.url, folder=folder / "run", workers=2)
    log = server.log()
    records = result.log.records
    assert len(records) > 150
    assert {record.outcome for record in records} == {Outcome.OK}
    assert {record.worker for record in records} == {0, 1}
    assert all(record.chunks == 12 == record.completion_tokens for record in records)
    assert min(record.delay or 0.0 for record in records) >= 0.0  # nothing is sent early
    start = json.loads((folder / "run" / "start.json").read_text())["start"]

    # What the machine adds to the simplest client at the same time: on the way there, and on the way back.
    end = start + max(record.planned for record in records)
    names = [name for name, at in control.sent.items() if start <= at <= end]
    there = median(log[name]["arrived"] - control.sent[name] for name in names)
    back = median(
        at - sent
        for name in names
        for at, sent in zip(control.received[name], log[name]["visible"], strict=True)
    )

    def error(
        what: str, pairs: list[tuple[float, float]], machine: float
    ) -> tuple[str, float, float]:
        bound = max(0.002, 0.01 * median(truth for _, truth in pairs)) + machine
        return what, median(abs(measured - truth) for measured, truth in pairs), bound

    found = [(record, log[record.id], start + (record.sent or 0.0)) for record in records]
    return [
        # The client sends before the server gets it, so the true moment lies at most one way earlier.
        error(
            "schedule delay",
            [(r.delay or 0.0, seen["arrived"] - start - r.planned) for r, seen, _ in found],
            there,
        ),
        error("TTFT", [(r.ttft or 0.0, seen["visible"][0] - at) for r, seen, at in found], back),
        error("E2E", [(r.e2e or 0.0, seen["done"] - at) for r, seen, at in found], back),
        error(
            "ITL",
            [
                (gap, after - before)
                for r, seen, _ in found
                for gap, (before, after) in zip(r.gaps, pairwise(seen["visible"]), strict=True)
            ],
            back,
        ),
    ]


def test_latencies_are_those_of_the_server(server: FakeProcess, tmp_path: Path) -> None:
    # Noise only adds to an error: one run within the bounds shows that the generator itself is.
    for attempt in range(ATTEMPTS):
        errors = errors_of(server, tmp_path / str(attempt))
        for what, found, bound in errors:
            print(f"{what}: median error {found * 1000:.2f} ms, bound {bound * 1000:.2f} ms")
        if all(found <= bound for _, found, bound in errors):
            return
    pytest.fail(f"outside the bounds in {ATTEMPTS} runs, the last one: {errors}")


def test_later_turns_follow_the_answers_before_them(server: FakeProcess, tmp_path: Path) -> None:
    plan = {"first_delay": 0.02, "tokens": 2}
    file = workload(
        tmp_path,
        plan,
        'kind = "closed"\nusers = 3\nduration = 60\nsessions = 7',
        kind="conversation",
    )
    result = run("fake", file, None, server.url, folder=tmp_path / "run", workers=2)
    records = {(record.session, record.turn): record for record in result.log.records}
    assert sorted(records) == [(session, turn) for session in range(7) for turn in range(3)]
    assert {record.outcome for record in records.values()} == {Outcome.OK}
    for (session, turn), record in records.items():
        if turn:
            before = records[session, turn - 1]
            assert record.planned > (before.sent or 0) + (before.e2e or 0)
        assert record.delay is not None and record.delay >= 0
        # Users of a closed loop are shared among the workers: user n has sessions n, n + 3, ...
        assert record.worker == session % 3 % 2


def test_counters_are_reconciled(server: FakeProcess, tmp_path: Path) -> None:
    file = workload(tmp_path, {"tokens": 3}, 'kind = "constant"\nrate = 5\nduration = 2')
    result = run("fake", file, None, server.url, folder=tmp_path / "run")
    verdict = judge(result, Slo(), Bounds(1e9, 1e9, 1e9))
    assert [check.client for check in verdict.checks] == [10, 10 * 60, 30]
    assert verdict.status is Status.GOOD, verdict.missed
    assert (
        judge(load_result(tmp_path / "run"), Slo(), Bounds(1e9, 1e9, 1e9)).checks == verdict.checks
    )
    server.ask("someone else", {})
    other = run("fake", file, None, server.url, folder=tmp_path / "second")
    other.before = result.before
    assert judge(other, Slo(), Bounds(1e9, 1e9, 1e9)).status is Status.MISSED


def test_no_counters_are_read_where_several_servers_answer(
    server: FakeProcess, tmp_path: Path
) -> None:
    """Behind a load balancer the page is any one server's, and a load that went well would fail the comparison."""
    file = workload(tmp_path, {"tokens": 3}, 'kind = "constant"\nrate = 5\nduration = 2')
    command = [sys.executable, "-m", "loadtests", "run", str(file), "--url", server.url]
    command += ["--max-delay", "9", "--max-lag", "9", "--max-cpu", "9"]
    for name, more, read in (("one", [], True), ("several", ["--no-counters"], False)):
        done = subprocess.run(
            [*command, "--out", str(tmp_path / name), *more], capture_output=True, text=True
        )
        assert not done.returncode, done.stdout + done.stderr
        assert ("no counters were read" in done.stdout) is not read
        result = load_result(tmp_path / name / "server")
        assert [bool(result.before), bool(result.after), bool(result.samples)] == [read] * 3
        assert bool(judge(result, Slo(), Bounds(9, 9, 9)).checks) is read


@pytest.mark.parametrize("model", [[], ["--model", "fake"]], ids=["any model", "named model"])
def test_a_server_may_begin_to_answer_later(tmp_path: Path, model: list[str]) -> None:
    """A Job starts beside the servers that it is to load, and these load their model for minutes."""
    port = free_port()
    file = workload(tmp_path, {"tokens": 3}, 'kind = "constant"\nrate = 5\nduration = 1')
    command = [sys.executable, "-m", "loadtests", "run", str(file), *model]
    command += ["--url", f"http://127.0.0.1:{port}", "--max-delay", "9", "--max-lag", "9"]
    command += ["--max-cpu", "9", "--out"]
    refused = subprocess.run(
        [*command, str(tmp_path / "gone"), "--wait", "1"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "does not name a model" in refused.stderr
    waiting = subprocess.Popen(
        [*command, str(tmp_path / "run"), "--wait", "100"], stdout=subprocess.PIPE, text=True
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline().startswith("server: ")
    server = [sys.executable, "-m", "loadtests", "fake-server", "--port", str(port)]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL) as process:
        said, _ = waiting.communicate(timeout=PATIENCE)
        process.terminate()
    assert waiting.returncode == 0, said


def test_a_killed_worker_leaves_a_report_that_says_so(server: FakeProcess, tmp_path: Path) -> None:
    file = workload(tmp_path, {"first_delay": 0.5}, 'kind = "constant"\nrate = 8\nduration = 5')
    folder, results = tmp_path / "run", list[Result]()

    def measure() -> None:
        results.append(run("fake", file, None, server.url, folder=folder, workers=2))

    thread = threading.Thread(target=measure)
    thread.start()
    wait_for(lambda: answered(folder, 0) > 0)
    first = json.loads((folder / "records-0.jsonl").read_text().splitlines()[0])
    os.kill(first["pid"], signal.SIGKILL)
    thread.join(PATIENCE)
    (result,) = results
    assert result.dead_workers == [0]
    outcomes = {w: {r.outcome for r in result.log.records if r.worker == w} for w in (0, 1)}
    assert len(result.log.records) == 40
    assert Outcome.NOT_SENT in {record.outcome for record in result.log.records}
    assert Outcome.LOST in outcomes[0] and Outcome.OK in outcomes[1]
    verdict = judge(result, Slo(), Bounds(1e9, 1e9, 1e9))
    assert verdict.status is Status.INVALID and "worker 0 died" in verdict.invalid


def test_a_worker_that_cannot_go_on_is_dead(server: FakeProcess, tmp_path: Path) -> None:
    # Its text can be made, but not written as JSON: a lone half of a surrogate pair has no UTF-8.
    trace = tmp_path / "questions.json"
    trace.write_text('[{"question": "\\ud800", "ctxs": [{"text": "t"}]}]')
    file = tmp_path / "workload.toml"
    file.write_text(
        'kind = "questions"\n[questions]\n[arrivals]\nkind = "constant"\nrate = 1\nduration = 2\n'
    )
    result = run("fake", file, trace, server.url, folder=tmp_path / "run")
    assert result.dead_workers == [0]
    assert {record.outcome for record in result.log.records} == {Outcome.NOT_SENT}
    assert "surrogates not allowed" in (tmp_path / "run" / "worker-0.log").read_text()


def command(file: Path, url: str, out: Path) -> subprocess.Popen[bytes]:
    arguments = ["run", str(file), "--url", url, "--name", "fake", "--out", str(out)]
    return subprocess.Popen([sys.executable, "-m", "loadtests", *arguments])


def test_ctrl_c_leaves_a_report(server: FakeProcess, tmp_path: Path) -> None:
    file = workload(tmp_path, {"first_delay": 600}, 'kind = "constant"\nrate = 5\nduration = 600')
    out = tmp_path / "out"
    process = command(file, server.url, out)
    wait_for(lambda: answered(out / "fake", 0) > 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == Status.INTERRUPTED
    (found,) = json.loads((out / "report.json").read_text())["servers"]
    assert found["status"] == "INTERRUPTED"
    assert found["outcomes"].keys() == {"cancelled", "not_sent"}
    assert found["outcomes"]["cancelled"] >= 3 and found["requests"] == 3000
    assert "<svg" in (out / "report.html").read_text()
    assert {path.stem for path in out.glob("*.svg")} == {"latency", "ttft", "delay"}


def test_a_killed_runner_leaves_records_for_a_report(server: FakeProcess, tmp_path: Path) -> None:
    file = workload(tmp_path, {"tokens": 2}, 'kind = "constant"\nrate = 5\nduration = 600')
    out = tmp_path / "out"
    process = command(file, server.url, out)
    wait_for(lambda: answered(out / "fake", 0) > 3)
    worker = json.loads((out / "fake" / "records-0.jsonl").read_text().splitlines()[0])["pid"]
    process.kill()
    process.wait()
    wait_for(lambda: not _lives(worker))  # it ends with its runner
    arguments = ["report", str(out / "fake"), "--out", str(tmp_path / "again")]
    done = subprocess.run([sys.executable, "-m", "loadtests", *arguments], capture_output=True)
    assert done.returncode == Status.INTERRUPTED, done.stderr
    (found,) = json.loads((tmp_path / "again" / "report.json").read_text())["servers"]
    assert found["outcomes"]["ok"] >= 3


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_generator_that_cannot_keep_up_fails_the_run(server: FakeProcess, tmp_path: Path) -> None:
    # A core sends some hundred requests a second, so these are sent late on any machine.
    file = workload(
        tmp_path, {"tokens": 1}, 'kind = "bursts"\nrate = 600\nduration = 0.5\nsize = 300'
    )
    result = run("fake", file, None, server.url, folder=tmp_path / "run")
    verdict = judge(result, Slo(), Bounds())
    assert verdict.status is Status.INVALID
    assert any("late" in fault for fault in verdict.invalid)


def test_a_folder_may_be_named_from_where_the_user_stands(
    server: FakeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run in the folder itself, from where a relative path leads nowhere."""
    file = workload(tmp_path, {}, 'kind = "closed"\nusers = 1\nduration = 1\nsessions = 1')
    monkeypatch.chdir(tmp_path)
    result = run("fake", file.relative_to(tmp_path), None, server.url, folder=Path("out/run"))
    assert [record.outcome for record in result.log.records] == [Outcome.OK]


def test_what_cannot_be_run_is_refused(server: FakeProcess, tmp_path: Path) -> None:
    file = workload(tmp_path, {}, 'kind = "closed"\nusers = 1\nduration = 1\nsessions = 1')
    with pytest.raises(WorkloadError, match="--workers 1"):
        run("fake", file, None, server.url, folder=tmp_path / "run", workers=2)
    with pytest.raises(RunError, match="does not name a model"):
        run("fake", file, None, "http://127.0.0.1:1", folder=tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("{}")
    with pytest.raises(RunError, match="--out"):
        run("fake", file, None, server.url, folder=tmp_path / "run")
    with pytest.raises(RunError, match="holds no run"):
        load_result(tmp_path)
