"""Requests per second over HTTP at which stock vLLM and spans no longer keep the same objective, on one GPU.

    python -m benchmarks.gpu_knee --out FOLDER

Both servers are up at once, and one at a time is under load: first a closed loop that fills its cache, then a rising
rate of such requests over a shared library of documents. The knee is the last rate of which enough requests got their
first token in time. Each server has a ramp of its own around its knee; requests, seed and objective are the same.

The model has random weights in the shape of Llama 3 8B, with the embedded model's tokenizer and vocabulary: answers are
made of visible text. Prompts are token ids, so both servers get the same tokens. With ``--tiny`` all of it runs on a
CPU with a model of two layers: a check of the benchmark, not a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_options import LLAMA_8B, PIECEWISE, TINY_LLAMA, execution, write_config
from benchmarks.report import meta, say, write
from demo.server import Server, ServerError, free_port
from loadtests import report
from loadtests.runner import Result, run
from loadtests.servers import server_command
from loadtests.stream import Limits
from loadtests.summary import Bounds, Slo
from loadtests.verdict import Verdict, judge

GOAL = 5.0
VOCABULARY = 49152
"""Of the embedded model's tokenizer."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A rising rate.

    Attributes:
        first: Sessions per second of the first step.
        last: Of the last one.
        steps: How many.
        seconds: Length of a step.
    """

    first: float
    last: float
    steps: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Ramp:
        """From ``FIRST:LAST:STEPS:SECONDS``."""
        try:
            first, last, steps, seconds = text.split(":")
            return cls(float(first), float(last), int(steps), float(seconds))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not FIRST:LAST:STEPS:SECONDS, such as 1:8:8:10"
            ) from None


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        config: Of the model.
        flags: Of both servers.
        environ: Of both servers.
        count: Documents of the library.
        length: Words of a document; a word is a token.
        per_request: Documents of a request.
        users: Users of the closed loop that fills the cache.
        sessions: Its requests.
    """

    config: dict[str, Any]
    flags: tuple[str, ...]
    environ: dict[str, str]
    count: int
    length: int
    per_request: int
    users: int
    sessions: int


def large() -> Scale:
    """Both servers on one GPU of 141 GB."""
    engine = execution(PIECEWISE, False, 1536)
    flags = (
        "--load-format=dummy",
        "--max-model-len=32768",
        "--max-num-batched-tokens=16384",
        # A stated size lets both servers start at once: neither looks at the memory that is free.
        "--gpu-memory-utilization=0.44",
        f"--kv-cache-memory-bytes={44 * _GIB}",
        f"--compilation-config={json.dumps(engine.arguments['compilation_config'])}",
    )
    config = LLAMA_8B | {"vocab_size": VOCABULARY}
    return Scale(config, flags, engine.environ, 256, 1020, 16, 16, 96)


def tiny() -> Scale:
    """Both servers on a CPU."""
    flags = ("--load-format=dummy", "--max-model-len=2048", "--dtype=float32")
    config = TINY_LLAMA | {"vocab_size": VOCABULARY}
    return Scale(config, flags, {"VLLM_CPU_KVCACHE_SPACE": "1"}, 16, 60, 4, 2, 6)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_knee",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of records and report")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of the tokenizer; default: the embedded model's"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    steps = "FIRST:LAST:STEPS:SECONDS"
    parser.add_argument("--stock", type=Ramp.parse, default=Ramp(0.5, 4.0, 8, 8.0), metavar=steps)
    parser.add_argument(
        "--spans", type=Ramp.parse, default=Ramp(10.0, 37.0, 10, 8.0), metavar=steps
    )
    parser.add_argument("--ttft", type=float, default=2.0, metavar="S", help="the objective")
    parser.add_argument("--share", type=float, default=0.95, help="of requests that keep it")
    parser.add_argument("--workers", type=int, default=3, help="generator processes")
    parser.add_argument("--max-lag", type=float, default=Bounds().lag, metavar="S")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both servers and write the report and ``knee.json``.

    Returns:
        Exit status: 0 if both runs were valid and no request failed before the knee.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    scale = tiny() if options.tiny else large()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = model_folder(scale, out / "model", options.tokenizer)
    slo = Slo(ttft=options.ttft, share=options.share)
    bounds = dataclasses.replace(Bounds(), lag=options.max_lag)
    result: dict[str, Any] = {"meta": meta("benchmarks.gpu_knee", arguments, ("vllm", "torch"))}
    verdicts: list[Verdict] = []
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in ("stock", "spans"):
            servers[name] = stack.enter_context(server(name == "spans", model, scale, out))
        for name, each in servers.items():
            try:
                say(f"{name}: ready after {each.wait_ready(timeout=300):.0f} s")
            except ServerError as error:
                print(each.log_tail(), file=sys.stderr)
                say(f"{name}: {error}")
                return 1
        for name, each in servers.items():
            ramp: Ramp = getattr(options, name)
            measured = measure(name, each.url, scale, ramp, out, options.workers)
            verdicts.append(judge(measured, slo, bounds))
            result[name] = summary(verdicts[-1], ramp)
            say(f"{name}: knee {result[name]['knee']:g}/s; {'; '.join(verdicts[-1].invalid)}")
            write(result, out / "knee.json")
    result["ratio"] = ratio(verdicts)
    result["goal"] = GOAL
    write(result, out / "knee.json")
    say(f"report: {report.write(verdicts, slo, out)}; knee of spans / stock: {result['ratio']}")
    return 1 if any(verdict.invalid for verdict in verdicts) else 0


def model_folder(scale: Scale, folder: Path, tokenizer: Path | None) -> Path:
    """A configuration without weights, and a tokenizer."""
    if tokenizer is None:
        from vllm_spans.embedded import ensure_model

        tokenizer = ensure_model(progress=say)
    write_config(scale.config, folder)
    for name in _TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def server(spans: bool, model: Path, scale: Scale, out: Path) -> Server:
    """A server that is not yet started."""
    port = free_port()
    flags = (str(model), "--served-model-name=knee", "--disable-uvicorn-access-log", *scale.flags)
    made = server_command(spans, port, flags=flags)
    log = out / f"{'spans' if spans else 'stock'}-server.log"
    return Server(made.command, port, log, {**made.environ, **scale.environ})


def measure(name: str, url: str, scale: Scale, ramp: Ramp, out: Path, workers: int) -> Result:
    """Fill a server's cache, then raise the rate."""
    closed = f'kind = "closed"\nusers = {scale.users}\nduration = 600\nsessions = {scale.sessions}'
    filling = workload(scale, out / f"{name}-fill.toml", seed=1, arrivals=closed)
    marked = name == "spans"
    run(name, filling, None, url, folder=out / f"{name}-fill", marked=marked)
    say(f"{name}: cache filled")
    rising = (
        f'kind = "ramp"\nfirst = {ramp.first}\nlast = {ramp.last}\nsteps = {ramp.steps}\n'
        f"step_seconds = {ramp.seconds}\neven = true"
    )
    file = workload(scale, out / f"{name}-ramp.toml", seed=2, arrivals=rising)
    # What is far beyond the objective is given up, or the server would be busy with it for long after the ramp.
    limits = Limits(10.0, 10.0, 20.0)
    return run(
        name,
        file,
        None,
        url,
        folder=out / name,
        marked=marked,
        workers=workers,
        limits=limits,
    )


def workload(scale: Scale, path: Path, seed: int, arrivals: str) -> Path:
    """A workload file; filling and ramp have the same library and other requests."""
    path.write_text(
        f"""kind = "shared_documents"
seed = {seed}
form = "offsets"

[output]
max_tokens = 16
ignore_eos = true

[shared_documents]
library_seed = 1
count = {scale.count}
length = {scale.length}
zipf = 1.0
per_request = {scale.per_request}
question_length = 24

[arrivals]
{arrivals}
""",
        encoding="utf-8",
    )
    return path


def summary(verdict: Verdict, ramp: Ramp) -> dict[str, Any]:
    """What of a run goes into the result file."""
    found = verdict.summary
    return {
        "knee": found["knee"],
        "ramp": dataclasses.asdict(ramp),
        "outcomes": found["outcomes"],
        "stages": [
            {
                "rate": stage["rate"],
                "requests": stage["requests"],
                "share": stage["share"],
                "ttft_p50": stage["ttft"]["p50"] if stage["ttft"]["count"] else None,
            }
            for stage in found["stages"]
        ],
        "invalid": verdict.invalid,
    }


def ratio(verdicts: Sequence[Verdict]) -> float | None:
    """Knee of spans over that of stock; ``None`` if stock keeps the objective at no rate."""
    stock, spans = (verdict.summary["knee"] for verdict in verdicts)
    return round(spans / stock, 2) if stock else None


if __name__ == "__main__":
    sys.exit(main())
