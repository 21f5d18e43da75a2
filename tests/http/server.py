"""A real ``vllm serve`` in its own process group, and what its tests ask of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.harness import ROOT, engine_env

MODEL_NAME = "tiny"


class Server:
    """``vllm serve`` with the plugin enabled.

    Args:
        model: Model folder.
        *flags: Further command line flags.
        env: Further environment variables.
        patience: Seconds that it may take to start.

    Raises:
        RuntimeError: If the server ends or does not get ready.
    """

    def __init__(
        self,
        model: str,
        *flags: str,
        env: dict[str, str] | None = None,
        patience: float = 240.0,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        environment = engine_env(True, **(env or {}))
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
        command = [sys.executable, "-m", "vllm_spans.launch", "serve", model]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "2048", *flags]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_ready(patience)
        except BaseException:
            self.close()
            raise

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended while starting\n{self.log_tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"the server is not ready after {timeout} s\n{self.log_tail()}")

    def log_tail(self, size: int = 6000) -> str:
        """The end of what the server printed."""
        self.log.seek(0)
        return self.log.read()[-size:]

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics``, summed over its labels."""
        result: dict[str, float] = {}
        text = httpx.get(f"{self.url}/metrics", timeout=60, follow_redirects=True).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                result[sample.name] = result.get(sample.name, 0.0) + sample.value
        return result

    def wait_idle(self, timeout: float = 120.0) -> dict[str, float]:
        """Wait until nothing runs or waits.

        Returns:
            The metrics of the idle server, or the last ones seen.
        """
        deadline = time.monotonic() + timeout
        while True:
            seen = self.metrics()
            busy = sum(
                seen.get(name, 0.0)
                for name in (
                    "vllm:num_requests_running",
                    "vllm:num_requests_waiting",
                    "vllm:kv_cache_usage_perc",
                )
            )
            if not busy or time.monotonic() > deadline:
                return seen
            time.sleep(0.5)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=120)

    def close(self) -> None:
        """End the server and the processes that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()
