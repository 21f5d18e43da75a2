"""What a worker process has to know, handed over in a file; pure but for the file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.stream import Limits
from loadtests.workloads import Plan, load

JOB_VARIABLE = "LOADTEST_JOB"
WORKER_VARIABLE = "LOADTEST_WORKER"
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Job:
    """One run against one server.

    Attributes:
        workload: The workload file.
        data: The file of a trace or of questions.
        url: The server.
        model: The model's name there.
        marked: Whether spans are marked.
        workers: Processes that share the sessions.
        folder: Where they write.
        limits: How long answers may take.
    """

    workload: str
    data: str | None
    url: str
    model: str
    marked: bool
    workers: int
    folder: str
    limits: Limits = field(default_factory=Limits)

    def plan(self) -> Plan:
        """The workload."""
        return load(Path(self.workload), None if self.data is None else Path(self.data))

    @property
    def path(self) -> Path:
        """Where the job itself is written."""
        return Path(self.folder) / "job.json"

    @property
    def start_path(self) -> Path:
        """Where the start's time is written once all workers are ready."""
        return Path(self.folder) / "start.json"

    def records_path(self, worker: int) -> Path:
        """Where a worker writes."""
        return Path(self.folder) / f"records-{worker}.jsonl"

    def log_path(self, worker: int) -> Path:
        """Where a worker's process prints."""
        return Path(self.folder) / f"worker-{worker}.log"

    def save(self) -> None:
        """Write it."""
        self.path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job that ``save`` wrote."""
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**found, "limits": Limits(**found["limits"])})
