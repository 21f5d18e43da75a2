"""Prevents: a server that answers 5xx, leaks, or answers wrong after a burst of mixed requests."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, tokens
from tests.http.server import MODEL_NAME, Server
from tests.http.traffic import flood


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[Server]:
    """One server for the module, with a small cache and small steps so that requests meet."""
    running = Server(
        tiny_model,
        "--num-gpu-blocks-override=400",
        "--max-num-batched-tokens=1024",
        "--max-num-seqs=32",
        "--enable-prompt-tokens-details",
    )
    yield running
    running.close()


def a_case(seed: int) -> Case:
    rng = random.Random(seed)
    case = Case().prefix(tokens(rng, BLOCK))
    for blocks in (3, 2, 4):
        case.span(tokens(rng, blocks * BLOCK))
    return case.cross(tokens(rng, 11))


def ask(server: Server, case: Case, **extra: Any) -> dict[str, Any]:
    """Tokens, log-probabilities and usage of a completion with raw offsets."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": case.tokens,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "vllm_xargs": case.layout,
        **extra,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def logprobs(answer: dict[str, Any]) -> list[float]:
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


def test_300_concurrent_requests(server: Server) -> None:
    case = a_case(1)
    before = ask(server, case)
    traffic = asyncio.run(flood(server.url, 300))
    assert not traffic.problems, (
        f"{len(traffic.problems)} problems, {dict(traffic.statuses)}:\n"
        + "\n".join(traffic.problems[:10])
        + server.log_tail(3000)
    )
    assert not [status for status in traffic.statuses if status.startswith("5")]
    # Each kind has happened, so that none of them passes by being left out.
    assert traffic.statuses["400"] == 30
    assert traffic.statuses["200"] >= 230
    idle = server.wait_idle()
    assert idle["vllm:kv_cache_usage_perc"] == 0
    assert idle["vllm:num_requests_running"] == 0
    assert idle["vllm:num_requests_waiting"] == 0
    after = ask(server, case)
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    for one, two in zip(logprobs(before), logprobs(after), strict=True):
        assert abs(one - two) <= 1e-4


def test_counters_keep_their_identity(server: Server) -> None:
    """Whatever the traffic was: lookup = reused + isolated, and idle moves nothing."""
    ask(server, a_case(2))
    first = server.wait_idle()
    total = {
        name: first[f"vllm_spans_{name}_tokens_total"] for name in ("lookup", "reused", "isolated")
    }
    assert total["lookup"] > 0
    assert total["lookup"] == total["reused"] + total["isolated"]
    second = server.wait_idle()
    ours = {k: v for k, v in second.items() if k.startswith("vllm_spans")}
    assert ours == {k: v for k, v in first.items() if k.startswith("vllm_spans")}


def test_usage_and_counters_of_one_request(server: Server) -> None:
    """Gap tokens are not cached tokens, in usage and in the counters."""
    rng = random.Random(3)
    texts = [tokens(rng, n * BLOCK) for n in (3, 2, 4)]
    one, two = Case().prefix(tokens(rng, BLOCK)), Case().prefix(tokens(rng, 2 * BLOCK))
    for text in texts:
        one.span(text)
    for text in texts[::-1]:
        two.span(text)
    ask(server, one.cross(tokens(rng, 9)))
    before = server.wait_idle()
    answer = ask(server, two.cross(tokens(rng, 9)))
    after = server.wait_idle()
    names = ("lookup", "reused", "isolated", "gap")
    moved = {
        name: after[f"vllm_spans_{name}_tokens_total"] - before[f"vllm_spans_{name}_tokens_total"]
        for name in names
    }
    assert moved == {"lookup": 6 * BLOCK, "reused": 6 * BLOCK, "isolated": 0, "gap": 3 * BLOCK}
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(two.tokens)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK


def test_salt_over_http(server: Server) -> None:
    """A tenant's salt reaches every span of its request."""
    case = a_case(4)
    ask(server, case, cache_salt="a")
    for salt, cached in (("b", 0), ("a", len(case.tokens) // BLOCK * BLOCK)):
        details = ask(server, case, cache_salt=salt)["usage"]["prompt_tokens_details"]
        assert ((details or {}).get("cached_tokens") or 0) == cached, salt


def test_server_survives_bad_offsets(server: Server) -> None:
    """Bad input is an answer, never an engine that is dead for the next request."""
    case = a_case(5)
    for starts in ([1], [BLOCK, BLOCK], [-BLOCK], [10**9], ["a"], [True]):
        body = {
            "model": MODEL_NAME,
            "prompt": case.tokens,
            "max_tokens": 1,
            "vllm_xargs": {"span_starts": starts},
        }
        response = server.post("/v1/completions", body)
        assert response.status_code == 400, f"{starts}: {response.text}"
        assert "span_starts" in response.text
    assert ask(server, case)["choices"]


def test_status_shows_what_the_page_of_a_server_says(server: Server) -> None:
    """``vllm-spans status`` reads a real server's page: its model, its counters, and the spans asked for most."""
    case = a_case(6)
    for _ in range(3):
        ask(server, case)
    page = server.wait_idle()
    command = [sys.executable, "-m", "vllm_spans.cli", "status", "--json", "--target", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (name, model), *others = json.loads(done.stdout)["models"].items()
    assert (name, others) == (MODEL_NAME, [])
    assert model["pods"]["ready"] == 1
    assert model["counters"]["lookup_tokens"] == page["vllm_spans_lookup_tokens_total"]
    assert sum(model["counters"]["requests"].values()) == page["vllm_spans_requests_total"]
    ratio = page["vllm_spans_reused_tokens_total"] / page["vllm_spans_lookup_tokens_total"]
    assert model["reuse_ratio"] == pytest.approx(ratio)
    hot = [span["requests"] for span in model["hot_spans"]]
    assert 3 <= len(hot) <= 20
    assert hot == sorted(hot, reverse=True)
    assert hot[-1] >= 2
    assert sum(hot) == page["vllm_spans_hot_span_requests"]
