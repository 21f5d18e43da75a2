"""The parent's side of an engine process: start it, run workloads, compare answers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
ORACLE_TOLERANCE = 1e-3


class EngineError(RuntimeError):
    """The engine process answered with an exception, or died."""


def engine_env(spans: bool, **extra: str) -> dict[str, str]:
    """Environment of an engine process.

    Args:
        spans: Whether the plugin is enabled; without it no plugin is even loaded.
        **extra: Further variables.

    Returns:
        A full environment.
    """
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("VLLM_V1_SPANS", "VLLM_PLUGINS"))
    }
    env.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        # Tiny models gain nothing from a second thread, and threads that spin starve other processes.
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )
    if spans:
        env["VLLM_V1_SPANS_ENABLED"] = "1"
    else:
        env["VLLM_PLUGINS"] = ""
    env.update(extra)
    return env


class Engine:
    """One engine process.

    Args:
        model: Model folder.
        spans: Whether the plugin is enabled.
        env: Further environment variables.
        setup: ``module:function`` that the process calls before it loads the engine.
        **kwargs: Passed on to ``vllm.LLM``.

    Raises:
        EngineError: If the engine does not start.
    """

    def __init__(
        self,
        model: str,
        spans: bool = True,
        env: dict[str, str] | None = None,
        setup: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=ROOT,
            env=engine_env(spans, **(env or {})),
            text=True,
            bufsize=1,
        )
        options = {
            "model": model,
            "skip_tokenizer_init": not (Path(model) / "tokenizer.json").exists(),
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 4096,
            "disable_log_stats": False,
            "seed": 0,
            **kwargs,
        }
        if not spans:
            options.setdefault("block_size", 32)
        try:
            self.about: dict[str, Any] = self.ask("start", setup=setup, kwargs=options)
        except EngineError:
            self.close()
            raise

    def ask(self, op: str, timeout: float = 300.0, **message: Any) -> Any:
        """Send one operation and wait for its answer.

        Raises:
            EngineError: If the operation failed, the process died, or no answer came in time.
        """
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"op": op, **message}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"engine process is gone\n{self.log_tail()}") from None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready:
            self.process.kill()
            raise EngineError(f"no answer to {op} in {timeout} s\n{self.log_tail()}")
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(f"engine process died during {op}\n{self.log_tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{reply['trace']}\n{self.log_tail(2000)}")
        return reply["ok"]

    def log_tail(self, size: int = 4000) -> str:
        """The end of what the process printed."""
        self.log.seek(0)
        return self.log.read()[-size:]

    def run(
        self,
        requests: Sequence[dict[str, Any]],
        events: Sequence[dict[str, Any]] = (),
        max_steps: int = 5000,
    ) -> dict[str, Any]:
        """Run a scripted workload; see ``Worker.op_run``.

        Returns:
            ``{"results": {id: {"cached", "outputs"}}, "steps", "events", "preemptions"}``.
        """
        named = [{"id": f"r{i}", **request} for i, request in enumerate(requests)]
        return self.ask("run", requests=named, events=list(events), max_steps=max_steps)

    def one(self, request: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run one request and return its result."""
        return self.many([request], **kwargs)[0]

    def many(self, requests: Sequence[dict[str, Any]], **kwargs: Any) -> list[dict[str, Any]]:
        """Run requests that all arrive before the first step; their results in order."""
        results = self.run(requests, **kwargs)["results"]
        return [results[r.get("id", f"r{i}")] for i, r in enumerate(requests)]

    def reset(self) -> None:
        """Drop the prefix cache."""
        assert self.ask("reset"), "the prefix cache was not reset: a block is still in use"

    def free(self) -> int:
        """Number of free KV blocks at idle."""
        return int(self.ask("free"))

    def counters(self) -> dict[str, float]:
        """The ``vllm_spans`` counters of the process."""
        return dict(self.ask("counters"))

    def call(self, target: str, **kwargs: Any) -> Any:
        """Call ``module:function`` in the engine process, with the worker first."""
        return self.ask("call", target=target, kwargs=kwargs)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self.alive():
            # It has nothing to save, and a regular end takes seconds.
            self.process.kill()
        self.process.wait()
        self.log.close()


class EnginePool:
    """Engines by configuration, started when first asked for and shared by all tests.

    Args:
        limit: How many processes stay alive; the longest unused one ends first.
    """

    def __init__(self, limit: int = 5) -> None:
        self.limit = limit
        self.engines: OrderedDict[str, Engine] = OrderedDict()

    def get(self, model: str, **kwargs: Any) -> Engine:
        """The engine of this configuration, with an empty prefix cache.

        Args:
            model: Model folder.
            **kwargs: As for :class:`Engine`.
        """
        key = json.dumps([model, kwargs], sort_keys=True)
        engine = self.engines.pop(key, None)
        if engine is not None and engine.alive():
            try:
                engine.reset()
            except (EngineError, AssertionError):
                # Whatever test broke it has failed already; the next one gets a working engine.
                engine.close()
                engine = None
        else:
            engine = None
        if engine is None:
            while len(self.engines) >= self.limit:
                self.engines.popitem(last=False)[1].close()
            engine = Engine(model, **kwargs)
        self.engines[key] = engine
        return engine

    def close(self) -> None:
        """End every engine."""
        while self.engines:
            self.engines.popitem()[1].close()


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Largest gap between two answers' log-probabilities.

    Two greedy answers may part where two tokens are equally likely within the noise: such a step
    still counts with its gap, and what follows it is another text and is not compared. Answers that
    part with a larger gap show that gap.

    Args:
        first: A result of :meth:`Engine.one`.
        second: Another one.

    Returns:
        The largest difference over steps and tokens; infinite if nothing could be compared.
    """
    worst = 0.0
    assert first.get("outputs") and second.get("outputs"), (first, second)
    assert len(first["outputs"]) == len(second["outputs"])
    for a, b in zip(first["outputs"], second["outputs"], strict=True):
        if len(a["tokens"]) != len(b["tokens"]) or not a["logprobs"]:
            return float("inf")
        for x, y, p, q in zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True):
            common = p.keys() & q.keys()
            if str(x) not in common or str(y) not in common:
                return float("inf")
            worst = max([worst, *(abs(p[t] - q[t]) for t in common)])
            if x != y:
                worst = max(worst, abs(p[str(x)] - p[str(y)]))
                break
    return worst


def assert_same(
    first: dict[str, Any], second: dict[str, Any], why: str, tolerance: float = TOLERANCE
) -> None:
    """Assert that two answers are one within the noise of float32.

    Raises:
        AssertionError: Naming ``why`` and the gap.
    """
    worst = difference(first, second)
    assert worst <= tolerance, f"{why}: log-probabilities differ by {worst:.2e}"


def oracle_difference(result: dict[str, Any], rows: Any) -> float:
    """Largest gap between an answer and the oracle's log-probabilities for the same tokens.

    Args:
        result: A result of :meth:`Engine.one`.
        rows: ``[steps, vocabulary]`` log-probabilities from ``Oracle.score``.
    """
    worst = 0.0
    output = result["outputs"][0]
    for row, token, step in zip(rows, output["tokens"], output["logprobs"], strict=True):
        worst = max([worst, *(abs(float(row[int(t)]) - lp) for t, lp in step.items())])
        worst = max(worst, float(row.max()) - float(row[token]))
    return worst
