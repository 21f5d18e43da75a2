"""Prevents: two real servers on one folder that answer differently, fall over, or leave shared memory behind.

In a real server the worker is a process of its own: CPU memory is shared between the two.
"""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.cases import BLOCK, Case, documents, random_case
from tests.engine.harness import TOLERANCE
from tests.http.server import Server
from tests.http.test_server import ask, logprobs
from tests.offload.engines import block_files, connector
from vllm_spans.offload.cache_cli import verify_all


def serve(model: str, files: Path) -> Server:
    config = connector(cpu_memory="16MiB", files=str(files), files_limit="64MiB")
    return Server(
        model,
        "--num-gpu-blocks-override=70",
        "--max-num-seqs=8",
        "--kv-transfer-config",
        json.dumps(config),
    )


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "offload" in name}


@pytest.mark.slow
def test_two_servers_one_folder_and_a_restart(tiny_model: str, tmp_path: Path) -> None:
    """Both orders at once, one killed in the middle; its successor reuses what both have written."""
    rng = random.Random(77)
    pool = documents(rng, 8, (2, 5))
    cases = [random_case(rng, pool, max_spans=4, max_blocks=24) for _ in range(12)]
    servers = [serve(tiny_model, tmp_path) for _ in range(2)]
    assert not shared_memory(), "its name is dropped as soon as both processes have it"
    try:

        def work(job: tuple[Server, list[Case]]) -> list[list[float]]:
            server, mine = job
            return [logprobs(ask(server, case)) for case in mine]

        with ThreadPoolExecutor(4) as threads:
            answers = list(
                threads.map(
                    work,
                    [
                        (servers[0], cases),
                        (servers[1], cases[::-1]),
                        (servers[0], cases[::-1]),
                        (servers[1], cases),
                    ],
                )
            )
        expected = answers[0]
        for got in (answers[1][::-1], answers[2][::-1], answers[3]):
            for one, two in zip(expected, got, strict=True):
                assert one == pytest.approx(two, abs=TOLERANCE)
        for server in servers:
            seen = server.wait_idle()
            assert seen["vllm_spans_reused_tokens_total"] > 0
            assert seen["vllm:kv_cache_usage_perc"] == 0
            assert seen["vllm_spans_load_failures_total"] == 0
        os.killpg(servers[0].process.pid, signal.SIGKILL)
        servers[0].process.wait()
        assert not shared_memory()
        servers.append(serve(tiny_model, tmp_path))
        again = [logprobs(ask(servers[2], case)) for case in cases]
        for one, two in zip(expected, again, strict=True):
            assert one == pytest.approx(two, abs=TOLERANCE)
        seen = servers[2].wait_idle()
        assert seen["vllm_spans_reused_tokens_total"] > seen["vllm_spans_isolated_tokens_total"]
        result = verify_all(tmp_path, delete=False)
        assert result.files == len(block_files(tmp_path)) > 0 and not result.bad
    finally:
        for server in servers:
            server.close()


@pytest.mark.slow
def test_a_regular_end_writes_what_is_on_its_way(tiny_model: str, tmp_path: Path) -> None:
    case = random_case(random.Random(5), documents(random.Random(6), 3, (3, 4)), max_spans=3)
    server = serve(tiny_model, tmp_path)
    try:
        ask(server, case)
    finally:
        server.close()
    assert len(block_files(tmp_path)) >= len(case.tokens) // BLOCK
    assert not shared_memory()
