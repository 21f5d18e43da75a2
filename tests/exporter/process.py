"""A real ``vllm-spans exporter`` process, and what its tests ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from demo.server import free_port
from tests.engine.harness import ROOT
from tests.exporter.engines import wait_until

Labels = Mapping[str, str]


class ExporterProcess:
    """The command, listening on a free port of 127.0.0.1; a context manager.

    Args:
        *flags: Its flags.
        within: Command that the exporter's own is given to.
        environ: Further environment variables.
    """

    def __init__(
        self, *flags: str, within: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [*within, sys.executable, "-m", "vllm_spans.cli", "exporter", *flags]
        command += ["--listen", self.url.removeprefix("http://")]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> ExporterProcess:
        try:
            wait_until(lambda: self.answers("/healthz"), "the exporter answers")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()

    def answers(self, path: str) -> bool:
        """Whether a path is answered with 200."""
        assert self.process.poll() is None, f"the exporter has ended\n{self.log()}"
        try:
            return httpx.get(self.url + path, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        """Wait for the end of the first cycle."""
        wait_until(lambda: self.answers("/readyz"), "the exporter is ready")

    def end(self) -> int:
        """Ask it to end; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def log(self) -> str:
        """What it has written."""
        self._log.seek(0)
        return self._log.read()

    def page(self) -> str:
        """Its page of metrics."""
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of the samples of one name."""
        return [
            (dict(sample.labels), sample.value)
            for family in text_string_to_metric_families(self.page())
            for sample in family.samples
            if sample.name == name
        ]

    def value(self, name: str, **labels: str) -> float | None:
        """Sum of the samples with these labels among their own; ``None`` when there is none."""
        found = [value for own, value in self.samples(name) if labels.items() <= own.items()]
        return sum(found) if found else None

    def resident_mib(self) -> float:
        """Memory that it holds, in MiB."""
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
