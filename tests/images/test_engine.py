"""Prevents: a CPU image whose engine does not start under a strict cluster's rules, or starts without spans."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from demo.__main__ import QUESTION, load_documents
from demo.server import free_port
from tests.images.conftest import Engine
from tests.images.containers import CACHE, Container, output
from vllm_spans.patches.stock import patch_set_hash


def page(engine: Engine) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = httpx.get(f"{engine.url}/metrics").text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def ask(engine: Engine, order: int) -> str:
    documents = [{"title": each.title, "text": each.text} for each in load_documents()[:2]]
    body = {
        "model": "smollm2",
        "temperature": 0,
        "max_tokens": 4,
        "documents": documents[::order],
        "messages": [{"role": "user", "content": QUESTION}],
    }
    answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_documents_in_another_order_are_reused(engine: Engine) -> None:
    assert ask(engine, 1)
    before = sum(value for _, value in page(engine)["vllm_spans_reused_tokens_total"])
    assert ask(engine, -1)
    reused = sum(value for _, value in page(engine)["vllm_spans_reused_tokens_total"]) - before
    assert reused >= 200


def test_metrics_tell_the_patch_set_of_the_label(engine: Engine) -> None:
    ((labels, _),) = page(engine)["vllm_spans_build_info"]
    assert labels["patch_set"] == patch_set_hash()
    assert labels["vllm_version"] == "0.32.0"


def test_it_runs_as_nobody_in_particular(engine: Engine) -> None:
    assert engine.container.execute("id", "-u") == "54321"
    rights = engine.container.execute("grep", "CapEff", "/proc/1/status")
    assert int(rights.split()[1], 16) == 0


def test_what_it_writes_lies_in_its_folder(engine: Engine) -> None:
    """The root is read-only, so that a write elsewhere fails; a library that gives up on its cache says so."""
    assert "vllm" in engine.container.execute("ls", CACHE).split()
    for complaint in ("Read-only file system", "Permission denied", "getpwuid"):
        assert complaint not in engine.container.log()


def test_every_folder_for_caches_is_in_the_writable_one() -> None:
    names = ("CACHE", "HOME", "CONFIG", "MPLCONFIGDIR")
    lines = output("vllm-spans-cpu", "env").splitlines()
    for key, _, value in (line.partition("=") for line in lines):
        if key.endswith(names) or any(f"{name}_" in key for name in names):
            assert value.startswith(CACHE), f"{key}={value}"
    for key in ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(line.startswith(f"{key}=") for line in lines), key
    for key in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        assert any(line.startswith(f"{key}=") for line in lines), key


def test_sigterm_ends_an_engine_that_still_starts() -> None:
    """Python has no handler then, and a first process without one gets no signal at all."""
    command = ["vllm-spans", "serve", "/models/smollm2", "--port", str(free_port())]
    with Container("vllm-spans-cpu", *command, writable=("/tmp", CACHE)) as container:
        code, seconds = container.stop(30)
    assert code != 137, f"killed after {seconds:.0f} s"
    assert seconds < 20


def test_sigterm_ends_an_engine_at_work(engine: Engine) -> None:
    """The last test here, since starting another engine takes half a minute."""
    code, seconds = engine.container.stop(60)
    assert code == 0, f"ended with {code} after {seconds:.0f} s\n{engine.container.log()[-3000:]}"
    assert seconds < 50
