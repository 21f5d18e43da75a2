"""Teacher forcing: every engine is asked for every token of one given text, so that no step depends on an earlier one.

Free-running answers part at the first tie, and what follows the tie is another text. Here a step that differs counts as
one step, and the next one starts from the given text again.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.engine_process import EngineProcess, Request

TOP = 5
_fresh = itertools.count()


@dataclasses.dataclass(frozen=True)
class Step:
    """One next token.

    Attributes:
        token: The most likely one.
        logprobs: Log-probabilities of the likeliest tokens.
        cached: Prompt tokens that were cached; ``None`` for the later tokens of one request.
    """

    token: int
    logprobs: dict[str, float]
    cached: int | None

    @property
    def margin(self) -> float:
        """How far the second token is behind."""
        first, second = sorted(self.logprobs.values(), reverse=True)[:2]
        return first - second


Answers = list[list[Step]]
"""Per prompt, per step."""
Texts = list[list[int]]
"""Per prompt, the tokens that the steps go through."""


def fresh_salt() -> str:
    """A cache salt under which nothing is cached."""
    return f"fresh-{next(_fresh)}"


def salted(requests: Sequence[Request], salt: str) -> list[Request]:
    """The same requests under one salt."""
    return [{**request, "salt": salt} for request in requests]


def step_requests(prompt: Request, text: Sequence[int]) -> list[Request]:
    """One request per step: the prompt and the text so far. Spans stay; what follows the last one grows."""
    return [
        {**prompt, "tokens": prompt["tokens"] + list(text[:index])} for index in range(len(text))
    ]


def forced(
    engine: EngineProcess,
    prompts: Sequence[Request],
    texts: Texts,
    *,
    together: int | None = 1,
    cold: bool = False,
) -> Answers:
    """Each step as a request of its own: a prefill of what is not cached.

    Args:
        engine: Which to ask.
        prompts: Requests without the text.
        texts: As long as there are steps.
        together: Requests in flight at once, in the order of prompts and steps; ``None`` for all.
        cold: Every step is computed from nothing.
    """
    requests = [
        {**request, "salt": fresh_salt()} if cold else request
        for prompt, text in zip(prompts, texts, strict=True)
        for request in step_requests(prompt, text)
    ]
    steps = iter(_ask(engine, requests, together))
    return [[next(steps)[0] for _ in text] for text in texts]


def forced_in_pairs(engine: EngineProcess, prompts: Sequence[Request], texts: Texts) -> Answers:
    """Prompts 0 and 1 at once, then 2 and 3 and so on: equal steps in lockstep, under a salt of their own."""
    requests = []
    for pair in range(0, len(prompts), 2):
        both = (step_requests(prompts[index], texts[index]) for index in (pair, pair + 1))
        for equal_steps in zip(*both, strict=True):
            requests += salted(equal_steps, fresh_salt())
    found = [steps[0] for steps in _ask(engine, requests, 2, lockstep=True)]
    answers: Answers = []
    for text in texts[::2]:
        taken, found = found[: 2 * len(text)], found[2 * len(text) :]
        answers += [taken[::2], taken[1::2]]
    return answers


def decoded(
    engine: EngineProcess,
    prompts: Sequence[Request],
    texts: Texts,
    *,
    together: int | None = 1,
    cold: bool = False,
) -> Answers:
    """The steps of one decoding request per prompt; where its token is not the text's, another one goes on.

    Args:
        engine: Which to ask.
        prompts: Requests without the text.
        texts: As long as there are steps.
        together: Requests in flight at once; ``None`` for all.
        cold: The prompt is computed from nothing.
    """
    answers: Answers = [[] for _ in texts]
    salts = {"salt": fresh_salt()} if cold else {}
    open_ = list(range(len(texts)))
    while open_:
        requests = [
            {
                **prompts[index],
                **salts,
                "tokens": prompts[index]["tokens"] + texts[index][: len(answers[index])],
                "max_tokens": len(texts[index]) - len(answers[index]),
            }
            for index in open_
        ]
        for index, steps in zip(open_, _ask(engine, requests, together), strict=True):
            text, done = texts[index], answers[index]
            for step in steps:
                done.append(step)
                if step.token != text[len(done) - 1]:
                    break
        open_ = [index for index in open_ if len(answers[index]) < len(texts[index])]
    return answers


def greedy(
    engine: EngineProcess, prompts: Sequence[Request], steps: int, *, cold: bool = False
) -> tuple[Texts, Answers]:
    """The engine's own greedy text for each prompt, and the steps that made it."""
    requests = [
        {**prompt, "max_tokens": steps, **({"salt": fresh_salt()} if cold else {})}
        for prompt in prompts
    ]
    answers = _ask(engine, requests, 1)
    return [[step.token for step in steps_] for steps_ in answers], answers


def _ask(
    engine: EngineProcess, requests: list[Request], together: int | None, lockstep: bool = False
) -> Answers:
    outputs = engine.run(requests, logprobs=TOP, clients=together, lockstep=lockstep)["outputs"]
    answers = []
    for request, output in zip(requests, outputs, strict=True):
        wanted = request.get("max_tokens", 1)
        if len(output["tokens"]) != wanted:
            raise RuntimeError(
                f"{engine.name}: {len(output['tokens'])} of {wanted} tokens, finished for {output['finish']}"
            )
        answers.append(
            [
                Step(token, logprobs, None if index else output["cached"])
                for index, (token, logprobs) in enumerate(
                    zip(output["tokens"], output["logprobs"], strict=True)
                )
            ]
        )
    return answers


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far the log-probabilities of two runs are apart, over steps and the tokens likely in both.

    Attributes:
        same: Share of steps with the same most likely token.
        mean: Mean of the absolute differences.
        p99: Their 99th percentile.
        most: The largest.
    """

    same: float
    mean: float
    p99: float
    most: float

    def worse(self, other: Difference) -> Difference:
        """The worse of both in each respect."""
        pairs = {
            name: (getattr(self, name), getattr(other, name)) for name in ("mean", "p99", "most")
        }
        return Difference(
            same=min(self.same, other.same),
            **{name: max(values) for name, values in pairs.items()},
        )


class Comparison:
    """Steps of two runs side by side.

    Args:
        left: A run.
        right: The reference; its margins count.
    """

    def __init__(self, left: Answers, right: Answers) -> None:
        self._equal: list[bool] = []
        self._margins: list[float] = []
        gaps: list[float] = []
        for ours, theirs in zip(left, right, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                self._equal.append(a.token == b.token)
                self._margins.append(b.margin)
                gaps += _gaps(a, b)
        gaps.sort()
        self.difference = Difference(
            same=statistics.mean(self._equal),
            mean=statistics.mean(gaps),
            p99=gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
            most=gaps[-1],
        )

    @property
    def steps(self) -> int:
        """How many were compared."""
        return len(self._equal)

    def same_clear(self, noise: float) -> float | None:
        """Share of equal tokens among the steps whose margin is larger than ``noise``; ``None`` if there are none."""
        clear = self._clear(noise)
        return statistics.mean(clear) if clear else None

    def _clear(self, noise: float) -> list[bool]:
        return [
            equal
            for equal, margin in zip(self._equal, self._margins, strict=True)
            if margin > noise
        ]

    def result(self, noise: float) -> dict[str, Any]:
        """For the result file.

        Args:
            noise: The largest difference that is noise; ``same_clear`` leaves out steps with a smaller margin.
        """
        return {
            "steps": self.steps,
            "same": self.difference.same,
            "clear_steps": len(self._clear(noise)),
            "same_clear": self.same_clear(noise),
            "mean": self.difference.mean,
            "p99": self.difference.p99,
            "max": self.difference.most,
        }


def _gaps(a: Step, b: Step) -> list[float]:
    common = a.logprobs.keys() & b.logprobs.keys()
    gaps = [abs(a.logprobs[token] - b.logprobs[token]) for token in common]
    # The best token of one that is not even among the other's likely ones is at least this far off.
    for one, other in ((a, b), (b, a)):
        best = max(one.logprobs, key=one.logprobs.__getitem__)
        if best not in common:
            gaps.append(max(0.0, one.logprobs[best] - min(other.logprobs.values())))
    return gaps
