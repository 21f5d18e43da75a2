"""Time to the first token on the CPU: stock vLLM and spans, cold and in a new order."""

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess

DOCUMENT_TOKENS = 256
PREFIX_TOKENS = 64
QUESTION_TOKENS = 64
GOAL_DOCUMENTS, GOAL = 8, 4.0
_ENGINE = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 8192}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids and where the documents are."""

    tokens: list[int]
    extra_args: dict[str, Any]


class Material:
    """Random token ids for prompts; time does not depend on what they say."""

    def __init__(self, documents: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefix = self._tokens(PREFIX_TOKENS)
        self._documents = [self._tokens(DOCUMENT_TOKENS) for _ in range(documents)]
        self._question = self._tokens(QUESTION_TOKENS)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(count)]

    def prompt(self, order: Sequence[int]) -> Prompt:
        """The documents in an order, between the prefix and the question."""
        tokens = list(self._prefix)
        starts = []
        for index in order:
            starts.append(len(tokens))
            tokens += self._documents[index]
        extra_args = {"span_starts": starts, "cross_span_starts": [len(tokens)]}
        return Prompt(tokens + self._question, extra_args)


def new_order(documents: int, seed: int) -> list[int]:
    """An order that starts with another document than the first use did."""
    order = list(range(documents))
    random.Random(seed).shuffle(order)
    if order[0] == 0:
        order.append(order.pop(0))
    return order


def measure(
    model: Path, folder: Path, counts: Sequence[int], repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure both engines in turn.

    Args:
        model: Folder of the model.
        folder: Where the engines' logs go.
        counts: Numbers of documents.
        repeats: Measurements of each kind; the median counts.
        say: Called with a line of progress.

    Returns:
        Rows of the result file.
    """
    say("starting stock vLLM and vLLM with spans")
    with (
        EngineProcess(model, False, folder / "stock.log", _ENGINE) as stock,
        EngineProcess(model, True, folder / "spans.log", _ENGINE) as spans,
    ):
        for engine in (stock, spans):  # whatever the engines set up lazily
            warm_up = Material(2, seed=-1).prompt([0, 1])
            for _ in range(2):
                engine.run(
                    warm_up.tokens, "warm-up", warm_up.extra_args if engine is spans else None
                )
        rows = []
        for documents in counts:
            taken = _take(stock, spans, documents, repeats, say)
            rows += _rows(
                documents, {name: statistics.median(all_) for name, all_ in taken.items()}
            )
    return rows


def _take(
    stock: EngineProcess,
    spans: EngineProcess,
    documents: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    names = ("stock cold", "spans cold", "stock warm", "spans warm", "stock floor")
    taken: dict[str, list[float]] = {name: [] for name in names}

    def run(name: str, prompt: Prompt, salt: str) -> None:
        if name.startswith("stock"):
            timing = stock.run(prompt.tokens, salt, None)
        else:
            timing = spans.run(prompt.tokens, salt, prompt.extra_args)
        taken[name].append(timing.seconds)

    for repeat in range(repeats):
        material = Material(documents, seed=repeat)
        salt = f"{documents}-{repeat}"
        first = material.prompt(range(documents))
        other = material.prompt(new_order(documents, seed=repeat))
        steps = [
            ("stock cold", first),
            ("spans cold", first),
            ("stock warm", other),
            ("spans warm", other),
        ]
        if repeat % 2:  # neither engine always goes first
            steps[:2], steps[2:] = steps[1::-1], steps[:1:-1]
        for name, prompt in steps:
            run(name, prompt, salt)
        run("stock floor", other, salt)
        line = ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in taken.items())
        say(f"{documents} documents, {repeat + 1} of {repeats}: {line}")
    return taken


def _rows(documents: int, median: dict[str, float]) -> list[dict[str, Any]]:
    goal = GOAL if documents == GOAL_DOCUMENTS else None
    size = f"{documents} documents x {DOCUMENT_TOKENS} tokens"
    warm = median["stock warm"] / median["spans warm"]
    return [
        {
            "work": f"TTFT, {size}, first use",
            "stock": median["stock cold"],
            "spans": median["spans cold"],
            "unit": "s",
            "ratio": median["stock cold"] / median["spans cold"],
            "floor": None,
            "goal": None,
            "met": None,
        },
        {
            "work": f"TTFT, {size}, in a new order",
            "stock": median["stock warm"],
            "spans": median["spans warm"],
            "unit": "s",
            "ratio": warm,
            "floor": median["stock floor"],
            "goal": goal,
            "met": None if goal is None else warm >= goal,
        },
    ]
