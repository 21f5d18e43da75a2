"""Two real servers under traffic, the real exporter, and a real Prometheus that scrapes them all."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from demo.server import free_port
from tests.engine.cases import BLOCK, Case, documents, tokens
from tests.engine.harness import ROOT, engine_env
from tests.http.server import MODEL_NAME, Server
from tests.monitoring.queries import RULES, hasten
from tests.monitoring.tools import find
from tests.offload.engines import connector

EXPORTER_WINDOW = 15
START = 600.0
"""Seconds for six processes with an engine or an API server, on a machine that does other things as well."""


class Process:
    """A program of ours or Prometheus, in its own process.

    Args:
        command: Program and arguments.
        ready: Address that answers 200 once it is ready.

    Raises:
        RuntimeError: It ends or does not get ready.
    """

    def __init__(self, command: list[str], ready: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=engine_env(True), stdout=self.log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(lambda: self._answers(ready), f"{command[0]} to get ready")
        except BaseException as error:
            self.close()
            self.log.seek(0)
            raise RuntimeError(f"{error}\n{self.log.read()[-3000:]}") from error

    def _answers(self, url: str) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"it ended with {self.process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, timeout=5).status_code == 200
        return False

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)


def wait_for(done: Callable[[], Any], what: str, timeout: float = 120.0) -> Any:
    """Ask until there is an answer.

    Raises:
        TimeoutError: There was none.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer := done():
            return answer
        time.sleep(0.3)
    raise TimeoutError(f"waited {timeout:.0f} s for {what}")


class Traffic:
    """Requests over shared documents, to the servers in turn, from one thread until it is closed.

    Args:
        urls: The servers.
    """

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._rng = random.Random(7)
        self._pool = documents(self._rng, 24, (2, 5))
        self._client = httpx.Client(timeout=120)
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.gap_length: int | None = None
        """Gap length of all requests; while there is none, policies are mixed."""
        self.answers: Counter[tuple[str, str]] = Counter()
        """Answers by server and kind: ``spans``, ``plain`` or ``refused``."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, when the request on its way is answered."""
        self._end.set()
        self._thread.join(120)
        self._client.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Send nothing for a while."""
        with self._lock:
            yield

    def _run(self) -> None:
        number = 0
        while not self._end.is_set():
            with self._lock:
                round_, server = divmod(number, len(self._urls))
                self._send(self._urls[server], round_)
            number += 1
            # Whoever wants to pause gets a chance to.
            time.sleep(0.01)

    def _send(self, url: str, round_: int) -> None:
        rng = self._rng
        case = Case().prefix(tokens(rng, BLOCK))
        for text in rng.sample(self._pool, 6):
            case.span(text)
        case.cross(tokens(rng, rng.randint(5, 20)))
        args: dict[str, Any] = dict(case.layout)
        kind, status = "spans", 200
        if self.gap_length:
            args.update(span_gap_policy="legolink", span_gap_length=self.gap_length)
        elif round_ % 10 == 3:
            args, kind, status = {"span_starts": [7]}, "refused", 400
        elif round_ % 10 == 8:
            args, kind = {}, "plain"
        else:
            # Few gaps: far below the alert's target.
            policies = {5: "legolink", 6: "legolink", 17: "full"}
            args["span_gap_policy"] = policies.get(round_ % 20, "none")
            args["span_pad_tokens"] = rng.randint(0, 20)
        body = {"model": MODEL_NAME, "prompt": case.tokens, "max_tokens": 2, "vllm_xargs": args}
        answer = self._client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        self.answers[url, kind] += 1


class Live:
    """All of it, alive until it is closed.

    The first server has CPU memory and files behind its KV cache; the second has two data-parallel engines behind two
    API servers. One exporter reads them; another one is told of an API server of Kubernetes that does not answer.

    Args:
        model: Folder of the model.
        folder: For files.
    """

    def __init__(self, model: str, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._start(model, folder)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, model: str, folder: Path) -> None:
        small = ["--num-gpu-blocks-override=120", "--max-num-seqs=8"]
        tiers = connector(cpu_memory="4MiB", files=str(folder / "files"), files_limit="64MiB")
        flags = [
            [*small, f"--kv-transfer-config={json.dumps(tiers)}"],
            [*small, "--data-parallel-size=2", "--api-server-count=2"],
        ]
        with ThreadPoolExecutor() as threads:
            starting = [threads.submit(Server, model, *each, patience=START) for each in flags]
        for each in starting:
            if each.exception() is None:
                self._stack.callback(each.result().close)
        self.servers = [each.result() for each in starting]
        self.urls = [server.url for server in self.servers]
        self.exporter = self._exporter(*(f"--target={url}" for url in self.urls))
        self.lost_exporter = self._exporter(f"--kubeconfig={self._kubeconfig(folder)}")
        self.instance = {url: f"pod-{number}" for number, url in enumerate(self.urls)}
        self.instance |= {self.exporter: "exporter", self.lost_exporter: "lost-exporter"}
        self.prometheus = self._prometheus(folder)
        self.traffic = Traffic(self.urls)
        self.traffic.start()
        self._stack.callback(self.traffic.close)

    def close(self) -> None:
        """End all."""
        self._stack.close()

    def _run(self, command: list[str], ready: str) -> None:
        self._stack.callback(Process(command, ready).close)

    def _exporter(self, *arguments: str) -> str:
        port = free_port()
        command = [sys.executable, "-m", "vllm_spans.cli", "exporter"]
        command += [f"--listen=127.0.0.1:{port}", "--interval=1", "--timeout=0.9"]
        command += [f"--window={EXPORTER_WINDOW}", *arguments]
        url = f"http://127.0.0.1:{port}"
        self._run(command, f"{url}/healthz")
        return url

    def _kubeconfig(self, folder: Path) -> Path:
        """Credentials of a cluster on a port that nothing listens on."""
        path = folder / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{free_port()}"}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "c",
                }
            )
        )
        return path

    def _prometheus(self, folder: Path) -> str:
        rules = folder / "rules"
        rules.mkdir()
        for path in RULES.glob("*.yaml"):
            text = hasten(path.read_text(encoding="utf-8"))
            text = re.sub(r"for: \d+[mh]", "for: 2s", text)
            (rules / path.name).write_text(re.sub(r"interval: \d+s", "interval: 1s", text))
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [f"{rules}/*.yaml"],
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [
                        {
                            "targets": [url.removeprefix("http://")],
                            "labels": {"instance": self.instance[url]},
                        }
                        for url in urls
                    ],
                }
                for job, urls in (
                    ("engines", self.urls),
                    ("exporters", [self.exporter, self.lost_exporter]),
                )
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        port = free_port()
        command = [find("prometheus"), f"--config.file={path}", "--log.level=warn"]
        command += [
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        url = f"http://127.0.0.1:{port}"
        self._run(command, f"{url}/-/ready")
        return url

    # ---- questions ----------------------------------------------------------------------------------------

    def pages(self) -> dict[str, str]:
        """``/metrics`` of every target, in the text format."""
        urls = [*self.urls, self.exporter, self.lost_exporter]
        return {
            url: httpx.get(f"{url}/metrics", timeout=30, follow_redirects=True).text for url in urls
        }

    def ask(self, path: str, **parameters: str) -> Any:
        """Prometheus's answer.

        Raises:
            AssertionError: It is an error.
        """
        answer = httpx.get(f"{self.prometheus}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Samples of an expression now; those that are not numbers are left out."""
        result = self.ask("query", query=expr)["result"]
        return [sample for sample in result if sample["value"][1] != "NaN"]

    def alerts(self, name: str) -> list[str]:
        """States of an alert: ``pending``, ``firing``."""
        return [
            alert["state"]
            for alert in self.ask("alerts")["alerts"]
            if alert["labels"]["alertname"] == name
        ]
