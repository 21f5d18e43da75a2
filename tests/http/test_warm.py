"""Prevents: a corpus that `warm` calls warm and that requests find cold; a second run that computes it again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import ROOT
from tests.engine.test_inv5_tenants import save_adapter
from tests.http.server import MODEL_NAME, Server
from tests.http.traffic import Traffic
from tests.offload.engines import connector
from vllm_spans import cli

DELIMITER = "<|span|>"
ADAPTER = "adapter"
MAX_SPANS = 6
QUESTION = "which of the options is the default?"


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module, with a delimiter and an adapter."""
    adapter = save_adapter(tmp_path_factory.mktemp("lora") / "adapter", 7)
    running = Server(
        tiny_model,
        "--enable-lora",
        "--max-lora-rank=8",
        f"--lora-modules={ADAPTER}={adapter}",
        env={"VLLM_V1_SPANS_DELIMITER": DELIMITER, "VLLM_V1_SPANS_MAX_SPANS": str(MAX_SPANS)},
    )
    yield running
    running.close()


class Folder:
    """A corpus of random texts that no other test has seen.

    Args:
        path: An empty folder.
        seed: Random seed.
        count: How many documents.
    """

    def __init__(self, path: Path, seed: int, count: int = 5) -> None:
        self.path = path
        rng = random.Random(seed)
        self.texts = [Traffic.text(rng, rng.randint(60, 120)) + "\n" for _ in range(count)]
        for index, text in enumerate(self.texts):
            (path / f"{index}.txt").write_text(text)


def warm(
    capsys: pytest.CaptureFixture[str], server: Server, *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, summary and messages of the command."""
    capsys.readouterr()
    code = cli.main(["warm", "--url", server.url, "--json", *arguments])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def chat(server: Server, form: str, texts: list[str], **extra: Any) -> dict[str, float]:
    """Send a request over documents behind rules; by how much it moved the counters."""
    user: dict[str, Any] = {"role": "user", "content": QUESTION}
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "max_tokens": 3,
        "messages": [{"role": "system", "content": "answer briefly"}, user],
        **extra,
    }
    if form == "documents":
        body["documents"] = [{"text": text} for text in texts]
    elif form == "part":
        parts = [{"type": "text", "text": text, "span": True} for text in texts]
        user["content"] = [*parts, {"type": "text", "text": QUESTION}]
    else:
        user["content"] = DELIMITER.join(["", *texts, QUESTION])
    before = server.wait_idle()
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    after = server.wait_idle()
    names = ("lookup", "reused", "isolated", "isolated_head")
    return {
        name: after.get(f"vllm_spans_{name}_tokens_total", 0)
        - before.get(f"vllm_spans_{name}_tokens_total", 0)
        for name in names
    }


def completed(server: Server) -> float:
    return server.metrics().get("vllm:request_success_total", 0)


@pytest.mark.parametrize("form", ["documents", "part", "text"])
def test_requests_find_a_warmed_corpus(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    folder = Folder(tmp_path, ["documents", "part", "text"].index(form))
    arguments = ["--form", form, str(tmp_path)]
    if form == "text":
        arguments += ["--delimiter", DELIMITER]
    code, cold, _ = warm(capsys, server, "--check", *arguments)
    assert (code, cold["documents"]["missing"], cold["requests"]) == (1, 5, 0)
    before = completed(server)
    code, first, messages = warm(capsys, server, "--batch-tokens=600", *arguments)
    assert code == 0, messages
    assert first["documents"]["computed"] == 5
    assert completed(server) - before == first["requests"] > 0
    tokens = first["tokens"]
    assert tokens["computed"] == tokens["total"] == cold["tokens"]["total"] > 5 * 60
    assert 0 < tokens["pads"] < 5 * 32
    # The tiny Llama: 4 layers of K and V, 2 heads of 64 elements of 4 bytes.
    assert first["kv_bytes"] == tokens["total"] * 4 * 2 * 2 * 64 * 4
    assert first["kv_cache_tokens"] > tokens["total"]

    # Another order, other rules, the server's own policy: all found, nothing computed in isolation.
    order = random.Random(9).sample(folder.texts, 5)
    moved = chat(server, form, order)
    assert moved["reused"] == moved["lookup"] > 0
    assert moved["isolated"] == moved["isolated_head"] == 0
    # Without gaps the whole of each span is looked up, and there.
    moved = chat(server, form, order, spans={"gap_policy": "none"})
    assert moved["reused"] == moved["lookup"] == tokens["total"]

    before = completed(server)
    code, second, _ = warm(capsys, server, *arguments)
    assert (code, second["requests"], second["documents"]["already_cached"]) == (0, 0, 5)
    assert second["tokens"]["already_cached"] == tokens["total"]
    assert completed(server) == before
    code, forced, _ = warm(capsys, server, "--force", *arguments)
    assert (code, forced["tokens"]["computed"]) == (0, 0)
    assert completed(server) - before == forced["requests"] > 0


def test_a_run_that_was_ended_goes_on(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path, 10)
    chat(server, "documents", folder.texts[:2], spans={"gap_policy": "none"})
    code, done, _ = warm(capsys, server, str(tmp_path))
    assert code == 0
    assert (done["documents"]["already_cached"], done["documents"]["computed"]) == (2, 3)
    # Spans that were cold under `legolink` are complete too: the blocks under the gap were computed for the others.
    other = Folder(tmp_path, 11)
    chat(server, "documents", other.texts)
    code, done, _ = warm(capsys, server, str(tmp_path))
    assert (code, done["documents"]["already_cached"], done["requests"]) == (0, 5, 0)


def test_tenants_and_adapters_are_warmed_apart(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer on what is cached must know the tenant and the adapter, or it is another one's."""
    folder = Folder(tmp_path, 20)
    kinds: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["--cache-salt", "a"], {"cache_salt": "a"}),
        (["--model", ADAPTER], {"model": ADAPTER}),
    ]
    for index, (arguments, extra) in enumerate(kinds):
        for later, _ in kinds[index:]:
            code, cold, _ = warm(capsys, server, "--check", *later, str(tmp_path))
            assert (code, cold["documents"]["missing"]) == (1, 5), later
        code, done, _ = warm(capsys, server, *arguments, str(tmp_path))
        assert (code, done["documents"]["computed"]) == (0, 5)
        moved = chat(server, "documents", folder.texts[::-1], **extra)
        assert moved["reused"] == moved["lookup"] > 0


def test_what_fails_is_named_and_the_rest_is_warm(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path, 30, count=2)
    (tmp_path / "empty.md").write_text("\n")
    (tmp_path / "long.md").write_text(Traffic.text(random.Random(31), 3000))
    (tmp_path / "more.jsonl").write_text(
        json.dumps({"text": folder.texts[0]}) + "\n" + json.dumps({"text": f"a{DELIMITER}b"})
    )
    arguments = ["--form", "text", "--delimiter", DELIMITER, str(tmp_path)]
    code, done, messages = warm(capsys, server, *arguments)
    assert code == 1
    failed = {Path(f["document"]).name: f["reason"] for f in done["failures"]}
    assert failed.keys() == {"empty.md", "long.md", "more.jsonl:2"}
    assert failed["empty.md"] == "is empty"
    assert "maximum context length is 2048 tokens" in failed["long.md"]
    assert DELIMITER in failed["more.jsonl:2"]
    assert all(f"{name}: " in messages for name in failed)
    counts = done["documents"]
    assert (counts["computed"], counts["duplicates"], counts["failed"]) == (2, 1, 3)
    assert counts["total"] == 6


def test_requests_keep_within_the_context(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(40)
    for index in range(2):
        (tmp_path / f"{index}.txt").write_text(Traffic.text(rng, 1100))
    rejected = server.metrics().get("vllm_spans_rejected_total", 0)
    arguments = ["--concurrency=1", "--batch-tokens=9999", str(tmp_path)]
    code, done, messages = warm(capsys, server, *arguments)
    assert code == 0, messages
    assert server.metrics().get("vllm_spans_rejected_total", 0) == rejected
    assert done["tokens"]["total"] > 2048
    assert (done["documents"]["computed"], done["requests"]) == (2, 2)


def test_a_request_that_is_refused_is_split(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document by itself is fine; together they are more spans than this server allows."""
    rng = random.Random(41)
    for index in range(MAX_SPANS + 1):
        (tmp_path / f"{index}.txt").write_text(Traffic.text(rng, 20))
    code, done, messages = warm(capsys, server, "--concurrency=1", str(tmp_path))
    assert code == 0, messages
    assert (done["documents"]["computed"], done["requests"]) == (MAX_SPANS + 1,) * 2


def test_settings_that_do_not_fit(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Folder(tmp_path, 50, count=1)
    for arguments, said in (
        (["--form", "text"], "--delimiter"),
        (["--delimiter", "%%"], "--form text"),
        (["--check", "--force"], "--force"),
        (["--glob", "*.pdf"], "--glob"),
    ):
        assert cli.main(["warm", "--url", server.url, *arguments, str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    arguments = ["--form", "text", "--delimiter", "%%", str(tmp_path)]
    code, done, messages = warm(capsys, server, *arguments)
    assert (code, done["documents"]["failed"]) == (1, 0)
    assert "--delimiter" in messages
    code, _, messages = warm(capsys, server, "--model", "other", str(tmp_path))
    assert code == 1
    assert f"but {MODEL_NAME}, {ADAPTER}" in messages


def start(url: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_spans.cli", "warm", "--url", url, *arguments]
    return subprocess.Popen(
        [*command, "--concurrency=2", "--batch-tokens=1", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_work(server: Server, before: float) -> None:
    deadline = time.monotonic() + 120
    while completed(server) <= before:
        assert time.monotonic() < deadline, "nothing is computed"
        time.sleep(0.05)


def test_ctrl_c_prints_the_summary(server: Server, tmp_path: Path) -> None:
    Folder(tmp_path, 60, count=300)
    before = completed(server)
    process = start(server.url, tmp_path)
    wait_for_work(server, before)
    process.send_signal(signal.SIGINT)
    output, messages = process.communicate(timeout=60)
    assert process.returncode == 130, messages
    assert "documents  300: " in output
    assert "not reached" in output
    assert "ended early: interrupted" in output
    assert "Traceback" not in messages
    # What it counted is there.
    counted = int(output.split("300: ")[1].split(" computed")[0])
    check = start(server.url, tmp_path, "--check", "--json")
    output, _ = check.communicate(timeout=120)
    assert json.loads(output)["documents"]["already_cached"] >= counted > 0


def test_a_server_that_is_too_small_and_then_goes_away(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    Folder(small, 70, count=40)
    Folder(large, 71, count=300)
    running = Server(tiny_model, "--num-gpu-blocks-override=68")
    try:
        code, done, _ = warm(capsys, running, "--concurrency=1", str(small))
        assert (code, done["documents"]["computed"]) == (0, 40)
        assert done["kv_cache_tokens"] == 67 * 32 < done["tokens"]["total"]
        assert warm(capsys, running, "--check", str(small))[1]["documents"]["missing"] > 0
        assert cli.main(["warm", "--url", running.url, "--check", str(small)]) == 1
        assert "cache holds 2,144 tokens, fewer than these spans" in capsys.readouterr().out

        before = completed(running)
        process = start(running.url, large, "--retries=2", "--json")
        wait_for_work(running, before)
        os.killpg(running.process.pid, signal.SIGKILL)
        output, messages = process.communicate(timeout=120)
    finally:
        running.close()
    assert process.returncode == 1
    done = json.loads(output)
    assert f"no answer from {running.url}" in done["ended_by"]
    assert "--url" in done["ended_by"]
    assert done["ended_by"] in messages
    assert 0 < done["documents"]["computed"] < 300
    assert done["documents"]["failed"] == 0, "an absent server is no fault of the documents"


def test_what_a_tier_holds_is_not_computed_again(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in the KV cache, then nothing in CPU memory either: a run finds the corpus, and sends nothing."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    Folder(corpus, 77, 4)
    config = connector(cpu_memory="32MiB", files=str(tmp_path / "files"))
    server = Server(
        tiny_model,
        f"--kv-transfer-config={json.dumps(config)}",
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    try:
        code, first, messages = warm(capsys, server, str(corpus))
        assert (code, first["documents"]["computed"]) == (0, 4), messages
        total = first["tokens"]["total"]
        assert first["tokens"]["by_source"] == {"gpu": 0, "cpu": 0, "file": 0, "computed": total}
        for place, query in (("cpu", ""), ("file", "?reset_external=true")):
            wait_until(lambda q=query: server.post(f"/reset_prefix_cache{q}", {}).json()["success"])
            before = completed(server)
            code, again, messages = warm(capsys, server, str(corpus))
            assert (code, again["requests"], again["documents"]["already_cached"]) == (0, 0, 4)
            assert {k: n for k, n in again["tokens"]["by_source"].items() if n} == {place: total}
            assert again["kv_bytes_by_source"][place] == first["kv_bytes"]
            assert completed(server) == before
        assert cli.main(["warm", "--url", server.url, str(corpus)]) == 0
        assert f"{total:,} in files" in capsys.readouterr().out
    finally:
        server.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Ask again and again; blocks are still on their way to a tier for a moment."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
