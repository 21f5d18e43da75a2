"""Prevents: counters that miss a request, count it twice, or move by themselves: no ratio of them means anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import BLOCK, documents, random_case
from tests.engine.harness import Engine
from tests.offload.engines import block_files, connector, forget, probe
from vllm_spans.core.layout import SpanLayout

BATCH = 100
DEFAULT_GAP = 32


@pytest.fixture
def engine(tiny_model: str, tmp_path: Path) -> Iterator[Engine]:
    """An engine in which everything is short: blocks, rows, CPU memory, files; its files are in ``tmp_path``."""
    running = Engine(
        tiny_model,
        num_gpu_blocks_override=60,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=6,
        kv_transfer_config=connector(
            cpu_memory="4MiB", files=str(tmp_path / "files"), files_limit="24MiB"
        ),
    )
    yield running
    running.close()


def span_tokens(request: dict[str, Any]) -> int:
    """Tokens of whole blocks in a request's spans."""
    layout = layout_of(request)
    assert layout is not None
    return sum(span.end - span.start for span in layout.spans)


def layout_of(request: dict[str, Any]) -> SpanLayout | None:
    keys = ("span_starts", "cross_span_starts")
    args = {key: request[key] for key in keys if request.get(key)}
    return SpanLayout.from_extra_args(args, len(request["tokens"]), BLOCK)


def expected(request: dict[str, Any]) -> dict[str, int]:
    """What one admitted request adds to the counters that do not depend on what is cached."""
    prompt = len(request["tokens"])
    layout = layout_of(request)
    if layout is None:
        return {}
    counts = {"requests": 1, "prompt": prompt, "pads": request["span_pad_tokens"], "lookup": 0}
    policy = request["span_gap_policy"] or "legolink"
    for span in layout.spans:
        gap = request["span_gap_length"] or DEFAULT_GAP
        if policy != "legolink" or span.start == 0:
            gap = 0
        size = span.end - span.start
        counts["lookup"] += 0 if policy == "full" else max(0, size - gap)
    return counts


def make_requests(rng: random.Random, pool: list[list[int]], batch: int) -> list[dict[str, Any]]:
    """Requests of one batch: all policies, some without spans, some with several answers."""
    requests = []
    for number in range(BATCH):
        case = random_case(rng, pool, max_spans=4, max_blocks=24)
        extra: dict[str, Any] = {
            "id": f"{batch}-{number}",
            "at": rng.randrange(60),
            "max_tokens": rng.randint(1, 3),
            "params": {"logprobs": None},
        }
        if rng.random() < 0.1:
            requests.append(case.plain(**extra))
            continue
        policy = rng.choice([None, None, "none", "legolink", "full"])
        gap = rng.choice([None, 2 * BLOCK]) if policy != "full" else None
        requests.append(
            case.request(policy, gap, span_pad_tokens=min(7, len(case.tokens)), **extra)
        )
    return requests


def make_events(rng: random.Random, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Aborts, preemptions and resets of the cache in the middle of a batch."""
    events: list[dict[str, Any]] = [
        {"at": request["at"] + rng.randrange(8), "do": "abort", "ids": [request["id"]]}
        for request in requests
        if rng.random() < 0.1
    ]
    for _ in range(3):
        events.append({"at": rng.randrange(5, 80), "do": "preempt"})
    events.append({"at": rng.randrange(5, 80), "do": "reset_running"})
    return events


def totals(requests: list[dict[str, Any]]) -> dict[str, int]:
    sums = {"requests": 0, "prompt": 0, "pads": 0, "lookup": 0}
    for request in requests:
        for name, value in expected(request).items():
            sums[name] += value
    return sums


def seen(counts: dict[str, float]) -> dict[str, int]:
    """The counters by short name, summed over their label."""
    short = {
        "requests": "vllm_spans_requests_total",
        "prompt": "vllm_spans_prompt_tokens_total",
        "pads": "vllm_spans_pad_tokens_total",
        "lookup": "vllm_spans_lookup_tokens_total",
        "reused": "vllm_spans_reused_tokens_total",
        "isolated": "vllm_spans_isolated_tokens_total",
        "gap": "vllm_spans_gap_tokens_total",
    }
    return {
        name: round(sum(v for key, v in counts.items() if key.partition("/")[0] == full))
        for name, full in short.items()
    }


@pytest.mark.parametrize("total", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_identities_hold_over_mixed_requests(engine: Engine, tmp_path: Path, total: int) -> None:
    """Each batch's counters are what its requests say, though they were preempted, retried, or lost files."""
    rng = random.Random(5)
    pool = documents(rng, 40, (1, 4))
    before = seen(probe(engine, "counters"))
    assert not any(before.values())
    preempted = aborted = 0
    for batch in range(total // BATCH):
        requests = make_requests(rng, pool, batch)
        # Without aborts a batch runs to its end, so that what it must count is known exactly.
        events = make_events(rng, requests) if batch % 4 else []
        if batch % 2 == 0:
            events = [event for event in events if event["do"] != "abort"]
        run = engine.run(requests, events, max_steps=20_000)
        results = run["results"]
        refused = [name for name, result in results.items() if "error" in result]
        assert not refused
        preempted += run["preemptions"]
        done = [request for request in requests if results[request["id"]].get("outputs")]
        aborted += len(requests) - len(done)
        assert batch % 2 or len(done) == len(requests)
        after = seen(probe(engine, "counters"))
        moved = {name: after[name] - before[name] for name in after}
        least, most = totals(done), totals(requests)
        for name, low in least.items():
            assert low <= moved[name] <= most[name], (batch, name, low, moved[name], most[name])
        assert moved["lookup"] == moved["reused"] + moved["isolated"], batch
        if not events:
            # Contexts are new in each request, so that what is cached is spans: gap tokens are never among it.
            spans = [request for request in requests if layout_of(request)]
            cached = sum(results[request["id"]]["cached"] for request in spans)
            assert moved["gap"] > 0
            assert cached == sum(map(span_tokens, spans)) - moved["isolated"] - moved["gap"], batch
        before = after
        damage(rng, engine, tmp_path / "files", with_memory=batch % 2 == 0)
    counts = probe(engine, "counters")
    assert preempted > total // 60 and aborted > total // 100
    # Each way to reuse, and to fail, has happened.
    happened = {name.removeprefix("vllm_spans_") for name, value in counts.items() if value}
    for name in (
        *(f"reused_tokens_total/{tier}" for tier in ("gpu", "cpu", "file")),
        *(f"requests_total/{outcome}" for outcome in ("warm", "partial", "cold", "full")),
        *(f"gap_tokens_total/{policy}" for policy in ("legolink", "full")),
        *(f"stored_blocks_total/{tier}" for tier in ("cpu", "file")),
        "load_failures_total/truncated",
        "isolated_head_tokens_total",
    ):
        assert name in happened, name
    assert counts["vllm_spans_gap_tokens_total/none"] == 0
    # At idle nothing moves.
    assert probe(engine, "counters") == counts


def damage(rng: random.Random, engine: Engine, folder: Path, with_memory: bool) -> None:
    """Cut some files short, and empty the KV cache, or CPU memory too so that files are read."""
    forget(engine, cpu=with_memory)
    files = block_files(folder)
    for path in rng.sample(files, len(files) // 20):
        path.write_bytes(path.read_bytes()[:100])
