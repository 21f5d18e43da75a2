"""Prevents a bad run from ending with exit status 0, and a report that leaves out what is wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from loadtests import report, workloads
from loadtests.counters import parse, reconcile, reuse
from loadtests.job import Job
from loadtests.outcome import Outcome
from loadtests.records import Log, Record
from loadtests.run_cli import status
from loadtests.runner import Result
from loadtests.summary import Bounds, Slo
from loadtests.verdict import Status, Verdict, compare, judge, pairs

PAGE = """\
# HELP vllm:prompt_tokens_total Prompt tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_total{engine="1"} 20.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0"} 1.7e9
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="length"} 3.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total 15.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 2.0
# TYPE vllm_spans_pad_tokens_total counter
vllm_spans_pad_tokens_total 6.0
# TYPE python_info gauge
python_info 1.0
"""
RAMP = {"kind": "ramp", "first": 1, "last": 3, "steps": 3, "step_seconds": 1}


def record(number: int, **changes: Any) -> Record:
    settings = {
        "planned": float(number),
        "sent": float(number),
        "ttft": 1.0,
        "gaps": (0.1, 0.2),
        "e2e": 2.0,
        "tpot": 0.1,
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "pad_tokens": 2,
        **changes,
    }
    return dataclasses.replace(Record(number, 0, 0, 0.0, Outcome.OK), **settings)


def result(
    records: list[Record], name: str = "spans", arrivals: Any = None, **changes: Any
) -> Result:
    settings = {
        "kind": "plain",
        "plain": {"length": 3},
        "arrivals": arrivals or {"kind": "constant", "rate": 1, "duration": 3},
    }
    return Result(
        name,
        Job("w.toml", None, "http://x", "m", True, 1, "folder"),
        workloads.parse(settings, "w", Path(".")),
        Log(records, [], {0}),
        10.0,
        **{"interrupted": False, **changes},
    )


GOOD = [record(number) for number in range(3)]
COUNTED = {"before": {}, "after": parse(PAGE)}


def test_counters_are_summed_over_labels() -> None:
    found = parse(PAGE)
    assert found["vllm:prompt_tokens_total"] == 120.0
    assert found["vllm:num_requests_running"] == 2.0
    assert not any(name.endswith("_created") or name == "python_info" for name in found)


def test_client_and_server_are_reconciled() -> None:
    checks = reconcile(GOOD, {}, parse(PAGE))
    assert [check.what for check in checks] == [
        "requests",
        "prompt tokens",
        "output tokens",
        "pad tokens",
    ]
    assert all(check.agrees for check in checks)
    for name in ("prompt_tokens", "completion_tokens", "pad_tokens"):
        other = [*GOOD[1:], record(0, **{name: 3})]
        assert sum(not check.agrees for check in reconcile(other, {}, parse(PAGE))) == 1
    assert not any(check.agrees for check in reconcile(GOOD, {}, {"x": 1.0}))
    grown = {name: value + 7 for name, value in parse(PAGE).items()}
    assert [c.server for c in reconcile(GOOD, parse(PAGE), grown)] == [7, 7 * 1, 7, 7]


def test_shares_of_reuse() -> None:
    after = {
        "vllm_spans_lookup_tokens_total": 100.0,
        "vllm_spans_reused_tokens_total": 80.0,
        "vllm_spans_gap_tokens_total": 20.0,
    }
    found = reuse(dict.fromkeys(after, 0.0), after)
    assert found == {"span_reuse": 0.8, "gap_ratio": 0.25, "prefix_hits": None}


CASES: list[tuple[Result, Slo, Status]] = [
    (result(GOOD, **COUNTED), Slo(), Status.GOOD),
    (result(GOOD), Slo(), Status.GOOD),
    (result(GOOD), Slo(ttft=0.5), Status.MISSED),
    (result([*GOOD, record(3, outcome=Outcome.NO_DONE)]), Slo(share=0.1), Status.MISSED),
    (result([]), Slo(), Status.MISSED),
    (result(GOOD[:2], **COUNTED), Slo(), Status.MISSED),
    (result(GOOD, interrupted=True), Slo(), Status.INTERRUPTED),
    (result([record(0, sent=1.0)]), Slo(), Status.INVALID),
    (dataclasses.replace(result(GOOD), log=Log(GOOD, [], set())), Slo(), Status.INVALID),
    (
        result([record(0, stage=0), record(1, stage=2, ttft=9.0)], arrivals=RAMP),
        Slo(ttft=2.0),
        Status.GOOD,
    ),
    (result([record(0, stage=0, ttft=9.0)], arrivals=RAMP), Slo(ttft=2.0), Status.MISSED),
]


@pytest.mark.parametrize(("found", "slo", "expected"), CASES)
def test_the_status_of_a_run(found: Result, slo: Slo, expected: Status) -> None:
    verdict = judge(found, slo, Bounds())
    assert verdict.status is expected
    assert bool(verdict.invalid or verdict.missed) == (expected in (Status.MISSED, Status.INVALID))


def test_the_least_knee() -> None:
    found = result([record(0, stage=0), record(1, stage=1, ttft=9.0)], arrivals=RAMP)
    assert judge(found, Slo(ttft=2.0), Bounds(), least_knee=1.0).status is Status.GOOD
    assert judge(found, Slo(ttft=2.0), Bounds(), least_knee=1.5).status is Status.MISSED


def test_the_status_of_a_comparison() -> None:
    def of(*results: Result) -> int:
        return status([judge(found, Slo(ttft=1.5), Bounds()) for found in results])

    slow, good = result([record(0, ttft=3.0)], "stock"), result(GOOD)
    failed = result([record(0, outcome=Outcome.HTTP_5XX)], "stock")
    assert of(slow, good) == 0  # stock is what spans are compared with
    assert of(good, slow) == 1
    assert of(failed, good) == 1
    assert of(result([record(0, sent=9.0)]), good) == 3
    assert of(good, result(GOOD, interrupted=True)) == 130


def test_requests_are_paired_by_what_they_are() -> None:
    first = [record(n, ttft=2.0 * n + 2, prompt_tokens=39) for n in range(4)]
    second = [
        record(3, ttft=2.0),
        record(0, ttft=1.0),
        record(1, outcome=Outcome.STALL),
        record(9),
    ]
    found = pairs(first, second)
    assert [pair.id for pair in found] == ["0.0", "3.0"]
    numbers = compare(found)
    assert numbers["pairs"] == 2 and numbers["ttft"] == 3.0
    assert numbers["prompt_tokens_more"] == {"median": -1, "max": -1}
    assert compare([])["ttft"] is None


@pytest.mark.parametrize("arrivals", [None, RAMP, {"kind": "closed", "users": 2, "duration": 1}])
def test_the_report_holds_what_was_measured_and_what_is_wrong(
    tmp_path: Path, arrivals: Any
) -> None:
    samples = [
        {"at": float(at), "counters": {"vllm_spans_lookup_tokens_total": 10.0 * at}}
        for at in range(3)
    ]
    verdicts: list[Verdict] = [
        judge(found, Slo(), Bounds())
        for found in (
            result([record(0, outcome=Outcome.BAD_JSON), GOOD[1]], "stock <b>", arrivals),
            result(GOOD[:2], "spans", arrivals, samples=samples, **COUNTED),
        )
    ]
    path = report.write(verdicts, Slo(), tmp_path)
    page = path.read_text()
    assert page.count("<svg") == (5 if arrivals is RAMP else 4)
    assert "stock &lt;b&gt;" in page and "stock <b>" not in page.replace("<!-- stock <b> -->", "")
    assert "1 bad_json" in page and "DIFFERENT" in page
    content = json.loads((tmp_path / "report.json").read_text())
    assert [server["status"] for server in content["servers"]] == ["MISSED", "MISSED"]
    assert content["comparison"]["pairs"] == 1
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [row["outcome"] for row in rows] == ["bad_json", "ok", "ok", "ok"]
    assert rows[3]["id"] == "1.0" and float(rows[3]["ttft"]) == 1.0
