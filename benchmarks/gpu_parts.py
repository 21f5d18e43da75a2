"""The timed parts of the GPU benchmark: each asks both engines in turn and gives rows of the result file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.engine_process import SPANS, STOCK, EngineProcess, Request
from benchmarks.gpu_sizes import Documents, Sizes
from benchmarks.report import Spread, line, row, say
from benchmarks.workloads import Corpus, unmarked, zipf_requests

NO_SPANS_GOAL = round(1 / 1.03, 3)
DECODE_GOAL = round(1 / 1.02, 3)
BLOCKS_GOAL, THROUGHPUT_GOAL = 4.0, 5.0


CACHED = {"cold": False, "without spans": False, "warm": True, "cached": True}
"""Whether a request in this state finds tokens in the cache."""


class Pair:
    """Both engines, and times in turn.

    Attributes:
        stock: Stock vLLM.
        spans: vLLM with spans.
    """

    def __init__(self, stock: EngineProcess, spans: EngineProcess) -> None:
        self.stock, self.spans = stock, spans
        self._of = {STOCK: stock, SPANS: spans}

    def __iter__(self) -> Any:
        return iter((self.stock, self.spans))

    def milliseconds(
        self, repeats: int, make: Callable[[int], dict[str, Request]]
    ) -> dict[str, Spread]:
        """TTFT of lone requests.

        Args:
            repeats: Measurements of each.
            make: Called with the number of the repeat; gives requests by name, in order. A name begins with
                that of its engine and ends with what the cache must hold (:data:`CACHED`).

        Returns:
            Milliseconds by name.

        Raises:
            RuntimeError: The cache held something else: the time would be that of another state.
        """
        taken: dict[str, list[float]] = {}
        for repeat in range(repeats):
            for name, request in make(repeat).items():
                engine, state = name.split(" ", 1)
                timing = self._of[engine].timing(request)
                if bool(timing.cached) is not CACHED[state]:
                    raise RuntimeError(f"{name}: {timing.cached} tokens were cached")
                taken.setdefault(name, []).append(timing.seconds * 1e3)
        return {name: Spread.of(values) for name, values in taken.items()}


def ttft(pair: Pair, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Stock cold and fully cached; spans cold, warm in a new order, and without spans."""
    corpus = Corpus("ttft", sizes.vocabulary)
    for shape in sizes.ttft:
        warmed = corpus.documents(shape.count, shape.length)
        # Unmeasured: whatever is set up lazily for prompts of this size; leaves `warmed` warm.
        for _ in range(2):
            pair.stock.timing(unmarked(corpus.shuffled(warmed)))
            pair.spans.timing(corpus.shuffled(warmed))

        def make(repeat: int, shape: Documents = shape, warmed: Any = warmed) -> dict[str, Request]:
            fresh = corpus.request(corpus.documents(shape.count, shape.length))
            size = len(fresh["tokens"])
            cold = {"stock cold": unmarked(fresh), "spans cold": fresh}
            if repeat % 2:  # neither engine always goes first
                cold = dict(reversed(cold.items()))
            return {
                **cold,
                "stock cached": corpus.other_question(fresh),
                "spans warm": corpus.shuffled(warmed),
                "spans without spans": {"tokens": corpus.tokens(size)},
            }

        taken = pair.milliseconds(sizes.repeats, make)
        spread = {name: [each.low, each.high] for name, each in taken.items()}
        cold, floor = taken["stock cold"].median, taken["stock cached"].median
        for work, name, goal in (
            ("warm in a new order", "spans warm", shape.warm_goal),
            ("first use (all cold)", "spans cold", shape.cold_goal),
            ("no spans", "spans without spans", NO_SPANS_GOAL),
        ):
            entry = row(
                f"TTFT {shape.name}, {work}",
                cold,
                taken[name].median,
                "ms",
                floor=floor if name == "spans warm" else None,
                goal=goal,
                spread={each: spread[each] for each in ("stock cold", "stock cached", name)},
            )
            say(line(entry))
            yield entry


def decode(pair: Pair, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A decode step of ordinary requests."""
    corpus = Corpus("decode", sizes.vocabulary)
    for batch, context in sizes.decode:
        requests = [{"tokens": corpus.tokens(context)} for _ in range(batch)]
        taken: dict[str, list[float]] = {STOCK: [], SPANS: []}
        for _ in range(3):
            for engine in pair:
                taken[engine.name] += engine.ask(
                    "decode", requests=requests, steps=sizes.decode_steps
                )["milliseconds"]
        middle = {name: statistics.median(steps) for name, steps in taken.items()}
        entry = row(
            f"decode step, {batch} x {context}, no spans",
            middle[STOCK],
            middle[SPANS],
            "ms",
            goal=DECODE_GOAL,
            quartiles={
                name: statistics.quantiles(steps, n=4)[::2] for name, steps in taken.items()
            },
        )
        say(line(entry))
        yield entry


def blocks(pair: Pair, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """KV blocks in use by requests that are all in flight, over the same documents in as many orders."""
    shape = sizes.blocks
    used, free = {}, {}
    for engine in pair:
        corpus = Corpus("blocks", sizes.vocabulary)
        documents = corpus.documents(shape.count, shape.length)
        requests = [corpus.shuffled(documents) for _ in range(shape.count)]
        if engine is pair.stock:
            requests = [unmarked(request) for request in requests]
        engine.ask("reset")
        answer = engine.run(requests, max_tokens=sizes.block_tokens)["blocks"]
        used[engine.name], free[engine.name] = answer["most"], answer["pool"] - answer["most"]
    entry = row(
        f"KV blocks in use, {shape.count} requests x {shape.count} documents of {shape.length}",
        used[STOCK],
        used[SPANS],
        "blocks",
        goal=BLOCKS_GOAL,
        # With none left, requests waited for blocks and the number says less than it seems.
        left_free=free,
    )
    say(line(entry))
    yield entry


def throughput(pair: Pair, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Closed loop over a shared-document workload, both engines from an empty cache."""
    shape = sizes.pool
    rate, more = {}, {}
    for engine in pair:
        requests = zipf_requests(
            sizes.requests, shape.count, sizes.picks, shape.length, 128, sizes.vocabulary
        )
        if engine is pair.stock:
            requests = [unmarked(request) for request in requests]
        engine.ask("reset")
        answer = engine.run(requests, max_tokens=32, clients=sizes.clients)
        rate[engine.name] = sizes.requests / answer["seconds"]
        first = [output["first"] for output in answer["outputs"]]
        cached = sum(output["cached"] for output in answer["outputs"])
        used = answer["blocks"]
        more[engine.name] = {
            "kv_usage_mean": used["mean"] / used["pool"],
            "kv_usage_most": used["most"] / used["pool"],
            "ttft_s": quantiles(first),
            "cached_share": cached / sum(len(request["tokens"]) for request in requests),
        }
    entry = row(
        f"requests/s, {sizes.requests} requests by {sizes.clients} clients, {sizes.picks} of "
        f"{shape.count} documents of {shape.length} (Zipf)",
        rate[STOCK],
        rate[SPANS],
        "1/s",
        goal=THROUGHPUT_GOAL,
        more_is_better=True,
        engines=more,
    )
    say(line(entry))
    say(f"  {more}")
    yield entry


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {"p50": statistics.median(values), "p95": statistics.quantiles(values, n=20)[-1]}


def profiles(pair: Pair, sizes: Sizes) -> dict[str, Any]:
    """Where the time of one warm step goes, and of a fully cached one of stock vLLM."""
    corpus = Corpus("profile", sizes.vocabulary)
    found = {}
    for shape in sizes.ttft:
        documents = corpus.documents(shape.count, shape.length)
        for _ in range(3):
            pair.spans.timing(corpus.shuffled(documents))
        fresh = corpus.request(documents)
        for _ in range(2):
            pair.stock.timing(unmarked(fresh))
        for name, engine, requests in (
            ("spans warm", pair.spans, [corpus.shuffled(documents) for _ in range(3)]),
            ("stock cached", pair.stock, [corpus.other_question(fresh) for _ in range(3)]),
        ):
            taken = engine.ask("profile", requests=requests)
            found[f"{name} {shape.name}"] = taken
            say(
                f"{name} {shape.name}: wall {taken['wall_ms']:.1f} ms, kernels {taken['kernels_ms']:.1f} ms"
            )
            for entry in taken["kernels"][:6]:
                say(f"    {entry['ms']:8.3f} ms {entry['calls']:>4} x {entry['name'][:80]}")
            for entry in taken["host"][:10]:
                say(f"    host {entry['own_ms']:8.2f} ms {entry['calls']:>6} x {entry['name']}")
    return found
