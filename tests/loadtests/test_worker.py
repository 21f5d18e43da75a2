"""Prevents a run whose first second measures how long its prompts take to make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.job import Job
from loadtests.worker import Worker


@pytest.mark.parametrize(("seconds", "ready"), [(1000, 64), (10, 20 + 1)])
def test_a_worker_is_ready_when_its_first_sessions_are(
    tmp_path: Path, seconds: int, ready: int
) -> None:
    """As many as it keeps ready, or all of them and the mark behind the last one."""
    file = tmp_path / "workload.toml"
    file.write_text(
        'kind = "plain"\n[plain]\nlength = 9\n[arrivals]\nkind = "constant"\nrate = 2\n'
        f"duration = {seconds}\n"
    )
    job = Job(str(file), None, "http://127.0.0.1:1", "m", True, 1, str(tmp_path))
    job.start_path.write_text(json.dumps({"start": 0.0}))
    worker = Worker(job, 0, None, lambda path, answer: None)
    worker.wait_for_start()
    assert worker.sessions_ahead == ready
