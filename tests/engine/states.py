"""The states a cache can be in before a request runs: the same answer must come out of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.engine.cases import BLOCK, Case, random_case, tokens
from tests.engine.harness import Engine

Result = dict[str, Any]
State = Callable[[Engine, Case, random.Random, dict[str, Any]], Result]


def reordered(case: Case, rng: random.Random, keep: float = 1.0) -> Case:
    """The same documents in another order behind another prefix, some left out."""
    bodies = [b for b in case.bodies if rng.random() < keep] or [case.bodies[0]]
    rng.shuffle(bodies)
    other = Case().prefix(tokens(rng, BLOCK * rng.randint(0, 4)))
    for body in bodies:
        other.span(list(body))
    return other.cross(tokens(rng, rng.randint(3, 40)))


def _others(case: Case, rng: random.Random, count: int) -> list[Case]:
    pool = [list(b) for b in case.bodies]
    return [random_case(rng, pool, max_spans=4, max_blocks=24) for _ in range(count)]


def cold(engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]) -> Result:
    """Nothing cached."""
    engine.reset()
    return engine.one(case.request(**how))


def warm(engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]) -> Result:
    """The same request ran before."""
    engine.reset()
    engine.one(case.request(**how))
    return engine.one(case.request(**how))


def warm_from_another_order(
    engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]
) -> Result:
    """Another request left the spans behind."""
    engine.reset()
    engine.one(reordered(case, rng).request(**how))
    return engine.one(case.request(**how))


def partly_warm(engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]) -> Result:
    """Half the spans are cached."""
    engine.reset()
    engine.one(reordered(case, rng, keep=0.5).request(**how))
    return engine.one(case.request(**how))


def evicted_in_the_middle(
    engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]
) -> Result:
    """Half the blocks are evicted, at random places, and free blocks hold garbage."""
    engine.reset()
    engine.one(case.request(**how))
    engine.one(reordered(case, rng).request(**how))
    engine.call("tests.engine.probes:evict_some", share=0.5, seed=rng.randrange(1 << 30))
    engine.call("tests.engine.probes:scribble_free_blocks")
    return engine.one(case.request(**how))


def same_step(engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]) -> Result:
    """Other requests compute the same spans in the same step."""
    engine.reset()
    before = [reordered(case, rng).request(**how), case.request(**how)]
    return engine.many([*before, case.request(**how)])[-1]


def full_batch(engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]) -> Result:
    """A batch full of others, with spans at other offsets, without spans, and decoding."""
    engine.reset()
    requests = [
        o.request(at=rng.randrange(4), max_tokens=rng.randint(1, 12)) for o in _others(case, rng, 4)
    ]
    requests += [
        {"tokens": tokens(rng, rng.randint(5, 300)), "at": rng.randrange(4)} for _ in range(3)
    ]
    mine = case.request(at=2, id="mine", **how)
    return engine.run([*requests, mine])["results"]["mine"]


def preempted(engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]) -> Result:
    """Evicted while running, resumed from the cache it left."""
    engine.reset()
    events = [{"at": at, "do": "preempt"} for at in sorted(rng.sample(range(1, 7), 3))]
    return engine.one(case.request(**how), events=events)


def preempted_and_evicted(
    engine: Engine, case: Case, rng: random.Random, how: dict[str, Any]
) -> Result:
    """Evicted while running, its cache dropped with it."""
    engine.reset()
    events = [{"at": at, "do": "reset_running"} for at in sorted(rng.sample(range(1, 7), 2))]
    return engine.one(case.request(**how), events=events)


STATES: dict[str, State] = {
    f.__name__: f
    for f in (
        cold,
        warm,
        warm_from_another_order,
        partly_warm,
        evicted_in_the_middle,
        same_step,
        full_batch,
        preempted,
        preempted_and_evicted,
    )
}
