"""Prevents: a look at what the tiers hold that is wrong, changes what they hold, or makes the engine wait."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, tokens
from tests.engine.harness import Engine
from tests.offload.engines import assert_nothing_left, connector, forget, moved, probe
from tests.offload.slow_files import slow_folder


def held(engine: Engine, request: dict[str, Any]) -> list[dict[str, int]]:
    """Blocks of each plus span by where they are, as ``explain`` tells."""
    answer = probe(engine, "explain", request=request)
    assert answer["tiers"] == ["cpu", "file"]
    found = []
    for piece in answer["pieces"]:
        if piece["kind"] == "plus":
            counts = {"gpu": piece["cached_tokens"], **piece["tier_tokens"]}
            found.append({place: n // BLOCK for place, n in counts.items() if n})
    return found


def test_where_each_span_is(tiers_engine: Engine) -> None:
    """A span in the KV cache, one in CPU memory, one in files, one in parts, one nowhere."""
    rng = random.Random(88)
    texts = [tokens(rng, 4 * BLOCK) for _ in range(5)]
    cases = [Case().span(text).cross([7]).request("none") for text in texts]
    whole = Case()
    for text in texts:
        whole.span(text)
    request = whole.cross([8]).request("none")
    assert held(tiers_engine, request) == [{}] * 5
    for case in cases[:2]:
        tiers_engine.one(case)
    forget(tiers_engine, cpu=True)
    tiers_engine.one(cases[2])
    probe(tiers_engine, "lose", keys=probe(tiers_engine, "keys_of", request=cases[1])[1:2])
    forget(tiers_engine)
    tiers_engine.one(cases[3])
    before = probe(tiers_engine, "counters")
    for _ in range(2):
        assert held(tiers_engine, request) == [{"file": 4}, {"file": 3}, {"cpu": 4}, {"gpu": 4}, {}]
    assert not moved(tiers_engine, before), "a look is no lookup"
    plan = probe(tiers_engine, "explain", request=request)["plan"]
    assert plan["reused_tokens"] == 15 * BLOCK and plan["isolated_tokens"] == 5 * BLOCK
    assert_nothing_left(tiers_engine)


@pytest.fixture
def slow_engine(tiny_model: str, tmp_path: Path) -> Iterator[tuple[Engine, Any]]:
    with slow_folder(tmp_path) as slow:
        config = connector(cpu_memory="16MiB", files=str(slow.path), load_timeout=60)
        engine = Engine(tiny_model, kv_transfer_config=config)
        try:
            yield engine, slow
        finally:
            slow.take(0)
            engine.close()


def test_files_that_cannot_be_looked_at_in_time(slow_engine: tuple[Engine, Any]) -> None:
    """The engine's thread goes on at once; what is not known in time counts as missing."""
    engine, slow = slow_engine
    request = Case().span(tokens(random.Random(89), 4 * BLOCK)).cross([7]).request("none")
    engine.one(request)
    forget(engine, cpu=True)
    assert held(engine, request) == [{"file": 4}]
    slow.take(0, look=3)
    probe(engine, "be_patient", seconds=1)
    answer = probe(engine, "explain", request=request)
    assert answer["waits"]
    assert answer["pieces"][0]["tier_tokens"] == {"cpu": 0, "file": 0}
    slow.take(0)
    probe(engine, "be_patient")
    assert engine.one(request)["cached"] == 4 * BLOCK
