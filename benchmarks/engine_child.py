"""The child of ``benchmarks.engine_process``: one engine that answers a line of JSON with another.

Every operation steps the engine itself, so that the time of a step and the blocks in use can be read between steps.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any


class Child:
    """Operations on one in-process engine.

    A request is ``{"tokens": [...]}`` with, if wanted, ``extra_args`` (the span layout), ``salt`` (what was cached
    under another one does not count) and ``max_tokens``.

    Args:
        arguments: Of ``vllm.LLM``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        begin = time.perf_counter()
        self.llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, **arguments)
        self.load_seconds = time.perf_counter() - begin
        self.torch = torch
        self.cuda = torch.cuda.is_available()
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.number = 0
        self.active: set[str] = set()

    # -- operations ---------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What the engine is made of."""
        scheduler = self.core.scheduler
        runners = self.core.model_executor.collective_rpc(_runner_name)
        return {
            "load_seconds": round(self.load_seconds, 1),
            "blocks": self._pool.num_gpu_blocks,
            "block_size": scheduler.block_size,
            "scheduler": type(scheduler).__name__,
            "spans": any(c.__module__.startswith("vllm_spans") for c in type(scheduler).__mro__),
            "runners": runners,
            "device": self.torch.cuda.get_device_name() if self.cuda else "cpu",
        }

    def reset(self, connector: bool = False) -> dict[str, Any]:
        """Drop the prefix cache, and what a connector holds in memory if asked to."""
        self._drain()
        return {"done": self.engine.reset_prefix_cache(reset_connector=connector)}

    def run(
        self,
        requests: list[dict[str, Any]],
        max_tokens: int = 1,
        logprobs: int | None = None,
        clients: int | None = None,
        lockstep: bool = False,
    ) -> dict[str, Any]:
        """Run requests to their end.

        Args:
            requests: In the order in which they are sent.
            max_tokens: Output tokens of a request that does not say.
            logprobs: Log-probabilities to report per token.
            clients: Most requests in flight; each further one is sent when one ends. ``None`` sends all at once.
            lockstep: Send the next ``clients`` requests only when all of the last ones have ended.

        Returns:
            ``outputs`` per request (tokens, logprobs, cached tokens, seconds to the first token since it was sent),
            ``seconds`` in all, and ``blocks``: in use at most, in use on average over steps, and in the pool.
        """
        clients = clients or len(requests)
        waiting = list(enumerate(requests))[::-1]
        results: list[dict[str, Any]] = [{} for _ in requests]
        sent: dict[str, tuple[int, float]] = {}
        pool, most, total, steps = self._pool, 0, 0, 0
        usable = pool.num_gpu_blocks - 1  # one is vLLM's null block
        begin = self._sync()
        while waiting or self.active:
            while waiting and len(self.active) < clients and not (lockstep and self.active):
                for _ in range(min(clients - len(self.active), len(waiting))):
                    index, request = waiting.pop()
                    sent[self._add(request, max_tokens, logprobs)] = index, time.perf_counter()
            for output in self.engine.step():
                index, since = sent[output.request_id]
                if output.outputs[0].token_ids:
                    results[index].setdefault("first", time.perf_counter() - since)
                if output.finished:
                    self.active.discard(output.request_id)
                    results[index] |= _result(output)
            used = usable - pool.get_num_free_blocks()
            most, total, steps = max(most, used), total + used, steps + 1
        seconds = self._sync() - begin
        self._drain()
        return {
            "outputs": results,
            "seconds": seconds,
            "blocks": {"most": most, "mean": total / steps, "pool": usable},
        }

    def decode(self, requests: list[dict[str, Any]], steps: int) -> dict[str, Any]:
        """Milliseconds of each step while all requests decode."""
        waiting = {self._add(request, steps + 40, None) for request in requests}
        while waiting:
            waiting -= {out.request_id for out in self.engine.step() if out.outputs[0].token_ids}
        for _ in range(8):
            self.engine.step()
        times = []
        before = self._sync()
        for _ in range(steps):
            self.engine.step()
            now = time.perf_counter()
            times.append((now - before) * 1e3)
            before = now
        self._abort()
        return {"milliseconds": times}

    def profile(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Where the time goes: wall, kernels by total time, host functions by own time.

        Args:
            requests: Three alike; the first is timed bare, since profiling makes the others slower.
        """
        import cProfile
        import pstats

        from torch.profiler import ProfilerActivity, profile

        bare, traced, watched = requests
        wall = self.run([bare])["seconds"] * 1e3
        activity = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        with profile(activities=[activity]) as kernels:
            self.run([traced])
        name = "device_time_total" if self.cuda else "self_cpu_time_total"
        events = sorted(kernels.key_averages(), key=lambda event: -getattr(event, name))
        host = cProfile.Profile()
        host.enable()
        self.run([watched])
        host.disable()
        stats = pstats.Stats(host).stats  # type: ignore[attr-defined]
        return {
            "wall_ms": wall,
            "kernels_ms": sum(getattr(event, name) for event in events) / 1e3,
            "kernels": [
                {"ms": getattr(event, name) / 1e3, "calls": event.count, "name": event.key[:100]}
                for event in events[:14]
            ],
            "host": [
                {
                    "own_ms": own * 1e3,
                    "total_ms": total * 1e3,
                    "calls": calls,
                    "name": f"{os.path.basename(path)}:{line} {function}",
                }
                for (path, line, function), (_, calls, own, total, _) in sorted(
                    stats.items(), key=lambda item: -item[1][2]
                )[:24]
            ],
        }

    def call(self, target: str, **arguments: Any) -> dict[str, Any]:
        """Call ``module:function`` with this child first; for tests."""
        return {"returned": load(target)(self, **arguments)}

    # -- helpers ------------------------------------------------------------------------------

    @property
    def _pool(self) -> Any:
        return self.core.scheduler.kv_cache_manager.block_pool

    def _sync(self) -> float:
        if self.cuda:
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def _add(self, request: dict[str, Any], max_tokens: int, logprobs: int | None) -> str:
        from vllm import SamplingParams

        self.number += 1
        name = str(self.number)
        params = SamplingParams(
            max_tokens=request.get("max_tokens", max_tokens),
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=request.get("extra_args"),
        )
        prompt = {"prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        self.engine.add_request(name, prompt, params)
        self.active.add(name)
        return name

    def _abort(self) -> None:
        self.engine.abort_request(list(self.active))
        self.active.clear()
        self._drain()

    def _drain(self) -> None:
        """Step until nothing is in flight: with asynchronous scheduling one more step is under way at the end."""
        while self.engine.has_unfinished_requests() or self.core.scheduler.has_requests():
            self.engine.step()


def _result(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in step.items()}
            for step in answer.logprobs or []
        ],
        "cached": output.num_cached_tokens or 0,
        "finish": answer.finish_reason,
    }


def _runner_name(worker: Any) -> str:
    return type(getattr(worker, "worker", worker).model_runner).__name__


def load(target: str) -> Any:
    """Import ``module:attribute``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    """Answer operations until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM may print; only answers go to the parent
    child: Child | None = None
    for line in sys.stdin:
        message = json.loads(line)
        op = message.pop("op")
        try:
            if op == "start":
                if setup := message.pop("setup", None):
                    load(setup)()
                child = Child(**message)
                answer = child.info()
            else:
                answer = getattr(child, op)(**message)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
            if child is not None:
                # What the failed operation left must not run into the next one's times.
                with contextlib.suppress(Exception):
                    child._abort()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
