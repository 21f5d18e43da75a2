"""Prevents: a job that counts as done, or as done well, before all workers have said so."""

from __future__ import annotations

import random

from vllm_spans.offload.metadata import JobReport, SpansWorkerMetadata, join_reports


def test_reports_add_up_in_any_order() -> None:
    rng = random.Random(3)
    for _ in range(50):
        workers, jobs = rng.randint(1, 4), range(rng.randint(1, 5))
        single = [
            (job, JobReport(1, rng.random() < 0.8, rng.random()))
            for job in jobs
            for _ in range(workers)
        ]
        slowest = {job: max(r.seconds for j, r in single if j == job) for job in jobs}
        rng.shuffle(single)
        total: dict[int, JobReport] = {}
        while single:
            step, single = single[:3], single[3:]
            reports = [SpansWorkerMetadata({job: report}) for job, report in step]
            whole = reports[0]
            for report in reports[1:]:
                joined = whole.aggregate(report)
                assert isinstance(joined, SpansWorkerMetadata)
                whole = joined
            total = join_reports(total, whole.ended)
        assert set(total) == set(jobs)
        assert {report.workers for report in total.values()} == {workers}
        assert {job: report.seconds for job, report in total.items()} == slowest


def test_one_failure_is_enough() -> None:
    good, bad = JobReport(1, True, 0.2), JobReport(1, False, 0.1)
    assert join_reports({7: good}, {7: bad}) == {7: JobReport(2, False, 0.2)}
    assert join_reports({7: bad}, {7: good}) == {7: JobReport(2, False, 0.2)}
    assert join_reports({7: good}, {8: bad}) == {7: good, 8: bad}
