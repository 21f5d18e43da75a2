"""The child of ``benchmarks.gpu_engine``: one engine that answers a line of JSON with another.

Every operation steps the engine itself, so that the time of a step and the blocks in use can be read between steps.
"""

import json
import os
import sys
import time
from typing import Any


class Child:
    """Operations on one in-process engine.

    Args:
        arguments: Of ``vllm.LLM``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        begin = time.perf_counter()
        self.llm = LLM(skip_tokenizer_init=True, **arguments)
        self.load_seconds = time.perf_counter() - begin
        self.torch = torch
        self.cuda = torch.cuda.is_available()
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.number = 0

    @property
    def pool(self) -> Any:
        return self.core.scheduler.kv_cache_manager.block_pool

    def sync(self) -> float:
        if self.cuda:
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def reset(self, **_: Any) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache()}

    def add(
        self, requests: list[dict[str, Any]], max_tokens: int, logprobs: int | None = None
    ) -> list[str]:
        from vllm import SamplingParams

        ids = []
        for request in requests:
            self.number += 1
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
            ids.append(str(self.number))
            self.engine.add_request(ids[-1], prompt, params)
        return ids

    def run(
        self, requests: list[dict[str, Any]], max_tokens: int = 1, logprobs: int | None = None
    ) -> dict[str, Any]:
        """Run requests together: outputs, seconds, fewest free blocks, seconds to each request's first token."""
        begin = self.sync()
        ids = self.add(requests, max_tokens, logprobs)
        finished: dict[str, Any] = {}
        first: dict[str, float] = {}
        free = self.pool.get_num_free_blocks()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                name = output.request_id
                if output.outputs and output.outputs[0].token_ids and name not in first:
                    first[name] = time.perf_counter() - begin
                if output.finished:
                    finished[name] = output
            free = min(free, self.pool.get_num_free_blocks())
        seconds = self.sync() - begin
        outputs = [
            {
                "tokens": list(finished[name].outputs[0].token_ids),
                "logprobs": [
                    {str(token): entry.logprob for token, entry in step.items()}
                    for step in finished[name].outputs[0].logprobs or []
                ],
                "cached": finished[name].num_cached_tokens or 0,
                "first": first.get(name),
            }
            for name in ids
        ]
        used = self.pool.num_gpu_blocks - 1 - free
        return {"outputs": outputs, "seconds": seconds, "blocks_used": used}

    def decode(self, requests: list[dict[str, Any]], steps: int) -> dict[str, Any]:
        """Milliseconds of each step while all requests decode."""
        ids = set(self.add(requests, steps + 40))
        started: set[str] = set()
        while started != ids:
            for output in self.engine.step():
                if output.outputs[0].token_ids:
                    started.add(output.request_id)
        for _ in range(8):
            self.engine.step()
        times = []
        before = self.sync()
        for _ in range(steps):
            self.engine.step()
            now = time.perf_counter()
            times.append((now - before) * 1e3)
            before = now
        self.engine.abort_request(list(ids))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"milliseconds": times}

    def profile(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Where the time of these requests goes: kernels by total time, host functions by own time."""
        import cProfile
        import pstats

        from torch.profiler import ProfilerActivity, profile

        result: dict[str, Any] = {}
        if self.cuda:
            with profile(activities=[ProfilerActivity.CUDA]) as kernels:
                self.run(requests)
            events = sorted(kernels.key_averages(), key=lambda event: -event.device_time_total)
            result["gpu_ms"] = sum(event.device_time_total for event in events) / 1e3
            result["kernels"] = [
                [round(event.device_time_total / 1e3, 3), event.count, event.key[:100]]
                for event in events[:14]
            ]
        host = cProfile.Profile()
        host.enable()
        self.run(requests)
        host.disable()
        stats = pstats.Stats(host)
        rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:24]  # type: ignore[attr-defined]
        result["host"] = [
            [
                round(own * 1e3, 2),
                round(total * 1e3, 2),
                calls,
                f"{os.path.basename(path)}:{line} {name}",
            ]
            for (path, line, name), (_, calls, own, total, _) in rows
        ]
        return result

    def info(self, **_: Any) -> dict[str, Any]:
        return {
            "load_seconds": self.load_seconds,
            "blocks": self.pool.num_gpu_blocks,
            "block_size": self.core.scheduler.block_size,
            "scheduler": type(self.core.scheduler).__name__,
            "runner": type(self.core.model_executor.driver_worker.worker.model_runner).__name__,
        }


def main() -> None:
    """Answer requests until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM may print; only answers go to the parent
    child = Child(json.loads(sys.stdin.readline()))
    print(json.dumps(child.info()), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = getattr(child, message.pop("op"))(**message)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
