"""One vLLM engine in its own process, driven over JSON lines.

The plugin is per process, so a stock engine, a fresh engine and one with a tiny KV cache can only
be compared across processes. Run as ``python -m tests.engine.worker``; the other end is
:mod:`tests.engine.harness`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any


class Worker:
    """Answers the operations of :class:`tests.engine.harness.Engine`."""

    def __init__(self, setup: str | None, kwargs: dict[str, Any]) -> None:
        if setup:
            load(setup)()
        from vllm import LLM

        self.llm = LLM(**kwargs)
        self.engine = self.llm.llm_engine
        self.loras: dict[str, Any] = {}
        self.preemptions = 0
        self._count_preemptions()
        self._add_stat_loggers()

    def _count_preemptions(self) -> None:
        stock = self.scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return stock(*args, **kwargs)

        self.scheduler._preempt_request = preempt

    def _add_stat_loggers(self) -> None:
        """Load stat logger plugins, which vLLM does in its server only."""
        from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group
        from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

        if self.engine.logger_manager is None:
            return
        for factory in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP).values():
            self.engine.logger_manager.stat_loggers.append(
                PerEngineStatLoggerAdapter(
                    vllm_config=self.engine.vllm_config,
                    engine_indexes=[0],
                    per_engine_stat_logger_factory=factory,
                )
            )

    @property
    def scheduler(self) -> Any:
        """The scheduler, which lives in this process."""
        return self.engine.engine_core.engine_core.scheduler

    # -- operations ---------------------------------------------------------------------------

    def op_describe(self) -> dict[str, Any]:
        """Classes in use and the size of the KV cache."""
        config = self.scheduler.vllm_config
        return {
            "scheduler": [f"{c.__module__}.{c.__qualname__}" for c in type(self.scheduler).__mro__],
            "block_size": config.cache_config.block_size,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "pid": os.getpid(),
        }

    def op_free(self) -> int:
        """Free blocks in the pool, after the engine has drained."""
        self.drain()
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def op_reset(self) -> bool:
        """Drop the prefix cache of an idle engine."""
        self.drain()
        return bool(self.engine.reset_prefix_cache())

    def op_counters(self) -> dict[str, float]:
        """Every ``vllm_spans`` sample of the process's metric registry."""
        from prometheus_client import REGISTRY

        result: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name.startswith("vllm_spans") and not sample.name.endswith("_created"):
                    result[sample.name] = result.get(sample.name, 0.0) + sample.value
        return result

    def op_call(self, target: str, kwargs: dict[str, Any]) -> Any:
        """Call ``module:function`` with this worker first."""
        return load(target)(self, **kwargs)

    def op_run(
        self, requests: list[dict[str, Any]], events: list[dict[str, Any]], max_steps: int
    ) -> Any:
        """Run a scripted workload to its end.

        Args:
            requests: See :meth:`add`; ``at`` is the step before which a request enters.
            events: ``{"at": step, "do": "abort"|"preempt"|"reset"|"reset_running", "ids": [...]}``.
            max_steps: More engine steps than this are a livelock.
        """
        waiting = sorted(requests, key=lambda r: r.get("at", 0))
        pending = sorted(events, key=lambda e: e["at"])
        results: dict[str, Any] = {r["id"]: {"steps": 0, "outputs": []} for r in requests}
        step = self.preemptions = 0
        log: list[Any] = []
        while waiting or pending or self.engine.has_unfinished_requests():
            while waiting and waiting[0].get("at", 0) <= step:
                request = waiting.pop(0)
                try:
                    self.add(request)
                except Exception as error:  # a refusal is a result
                    results[request["id"]]["error"] = f"{type(error).__name__}: {error}"
            while pending and pending[0]["at"] <= step:
                log.append(self.event(pending.pop(0)))
            if not self.engine.has_unfinished_requests():
                step = min(
                    [r.get("at", 0) for r in waiting] + [e["at"] for e in pending], default=step
                )
                continue
            self.collect(results)
            step += 1
            if step > max_steps:
                state = self.scheduler.requests
                raise RuntimeError(
                    f"no end after {max_steps} steps: "
                    + ", ".join(
                        f"{r.request_id} {r.status.name} {r.num_computed_tokens}/{r.num_tokens}"
                        for r in list(state.values())[:8]
                    )
                )
        self.drain()
        return {
            "results": results,
            "steps": step,
            "events": log,
            "preemptions": self.preemptions,
        }

    # -- helpers ------------------------------------------------------------------------------

    def add(self, request: dict[str, Any]) -> None:
        """Add one request of the harness's form to the engine."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        extra = {
            key: request[key]
            for key in (
                "span_starts",
                "cross_span_starts",
                "span_pad_tokens",
                "span_gap_policy",
                "span_gap_length",
            )
            if request.get(key) is not None
        }
        options = {
            "max_tokens": request.get("max_tokens", 6),
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 4,
            "detokenize": False,
            **request.get("params", {}),
        }
        if "structured" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options.pop("structured"))
        if "logit_bias" in options:
            options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
        params = SamplingParams(
            **options, extra_args=extra or None, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        lora = None
        if request.get("lora"):
            from vllm.lora.request import LoRARequest

            path = request["lora"]
            lora = self.loras.setdefault(path, LoRARequest(path, len(self.loras) + 1, path))
        self.engine.add_request(
            request["id"], prompt, params, lora_request=lora, priority=request.get("priority", 0)
        )

    def event(self, event: dict[str, Any]) -> Any:
        """Apply one scripted event; returns what to report of it."""
        kind = event["do"]
        if kind == "abort":
            self.engine.abort_request(event["ids"])
            return None
        if kind == "reset":
            return bool(self.engine.reset_prefix_cache())
        if kind == "reset_running":
            return bool(self.engine.reset_prefix_cache(reset_running_requests=True))
        if kind == "preempt":
            # vLLM's own path for evicting running requests, without dropping the cache.
            manager = self.scheduler.kv_cache_manager
            running = len(self.scheduler.running)
            manager.reset_prefix_cache = lambda: True
            try:
                self.engine.reset_prefix_cache(reset_running_requests=True)
            finally:
                del manager.reset_prefix_cache
            return running
        if kind == "usage":
            return float(manager_usage(self.scheduler))
        raise ValueError(f"unknown event {kind}")

    def collect(self, results: dict[str, Any]) -> None:
        """One engine step; finished requests go into ``results``."""
        if self.scheduler.connector is not None and not self.scheduler.running:
            # As vLLM's own loop does while KV is on its way: threads need the interpreter.
            time.sleep(0.001)
        for output in self.engine.step():
            if output.finished and output.request_id in results:
                results[output.request_id].update(
                    cached=output.num_cached_tokens,
                    outputs=[
                        {
                            "tokens": list(o.token_ids),
                            "text": o.text,
                            "finish": o.finish_reason,
                            "logprobs": [
                                {str(t): lp.logprob for t, lp in step.items()}
                                for step in (o.logprobs or [])
                            ],
                        }
                        for o in sorted(output.outputs, key=lambda o: o.index)
                    ],
                )

    def drain(self) -> None:
        """Step until the scheduler has freed what finished requests held."""
        for _ in range(8):
            core = self.engine.engine_core.engine_core
            if not self.scheduler.has_requests() and not getattr(core, "batch_queue", None):
                break
            self.engine.step()


def manager_usage(scheduler: Any) -> float:
    """Share of the KV pool in use."""
    return float(scheduler.kv_cache_manager.block_pool.get_usage())


def load(target: str) -> Any:
    """Import ``module:attribute``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    """Serve operations from stdin until it ends."""
    # vLLM and its libraries print to stdout: the protocol keeps a copy, and stdout becomes stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        message = json.loads(line)
        op = message.pop("op")
        try:
            if op == "start":
                worker = Worker(**message)
                answer = worker.op_describe()
            else:
                answer = getattr(worker, f"op_{op}")(**message)
            reply = {"ok": answer}
        except BaseException as error:
            reply = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-6000:],
            }
        channel.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
