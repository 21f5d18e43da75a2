"""An engine in a process of its own, so that stock vLLM and vLLM with spans live side by side."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

# The engine's workers spin this long for more work; the other engine is measured after that.
QUIET_SECONDS = 1.2


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measured request.

    Attributes:
        seconds: Time to the first token.
        cached: Prompt tokens that the engine says it had cached.
    """

    seconds: float
    cached: int


class EngineProcess:
    """An in-process vLLM engine behind a pipe, alive inside a ``with`` block.

    Args:
        model: Folder of the model.
        spans: Whether spans are switched on; stock vLLM otherwise.
        log: File for the engine's log.
        arguments: Arguments of ``vllm.LLM`` besides the model.
    """

    def __init__(self, model: Path, spans: bool, log: Path, arguments: dict[str, Any]) -> None:
        self._model = model
        self._spans = spans
        self._log = log
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "EngineProcess":
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VLLM_V1_SPANS_")
        }
        if self._spans:
            environ["VLLM_V1_SPANS_ENABLED"] = "1"
        environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
                start_new_session=True,
            )
        self._ask({"model": str(self._model), **self._arguments})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def run(self, tokens: list[int], salt: str, extra_args: dict[str, Any] | None) -> Timing:
        """Send one request and wait for its first token.

        Args:
            tokens: The prompt.
            salt: Cache salt; what was cached under another one does not count.
            extra_args: Span layout, or ``None``.
        """
        time.sleep(QUIET_SECONDS)
        answer = self._ask({"tokens": tokens, "salt": salt, "extra_args": extra_args})
        return Timing(answer["seconds"], answer["cached"])

    def forget(self, cpu_memory: bool) -> None:
        """Empty the KV cache, and CPU memory behind it if asked to; files stay.

        Raises:
            RuntimeError: Something is still in use.
        """
        if not self._ask({"forget": True, "cpu_memory": cpu_memory})["done"]:
            raise RuntimeError("the caches could not be emptied")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
            raise RuntimeError("the engine ended:\n" + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """The child: an engine that answers one line of JSON with another."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM may print; only answers go to the parent

    from vllm import LLM, SamplingParams

    llm = LLM(
        **json.loads(sys.stdin.readline()),
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "forget" in request:
            done = llm.llm_engine.reset_prefix_cache(reset_connector=request["cpu_memory"])
            print(json.dumps({"done": done}), file=answers, flush=True)
            continue
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=request["extra_args"],
        )
        prompt = {"prompt_token_ids": request["tokens"], "cache_salt": request["salt"]}
        begin = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answer = {"seconds": seconds, "cached": output.num_cached_tokens or 0}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
