"""Fixtures shared by all tests: tiny models, engine processes, and a rule against silent skips."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The machine is shared and noisy: no test may depend on how long it takes.
settings.register_profile("vllm_spans", deadline=None)
settings.load_profile("vllm_spans")

# `tests` has to be importable from engine processes and under every pytest import mode.
ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

_silent_skips: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note skips that do not say why."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = (
            str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        )
        reason = reason.removeprefix("Skipped:").strip()
        if not reason or reason in ("unconditional skip", "Skipped", "<Skipped instance>"):
            _silent_skips.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A test skipped without a reason fails the run: it would otherwise look like a passing one."""
    if _silent_skips and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that were skipped without a reason."""
    for nodeid in _silent_skips:
        terminalreporter.write_line(f"ERROR skipped without a reason: {nodeid}", red=True)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of a tiny random model by the name of its builder, saved once per session."""
    from tests.reference.models import save_model

    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = str(save_model(name, tmp_path_factory.mktemp(name)))
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_model(model_path: Callable[[str], str]) -> str:
    """A 4-layer Llama whose random weights react to their context; it has a chat template."""
    from tests.reference.tokenizer import save_tokenizer

    folder = Path(model_path("llama"))
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Folder of the embedded default model; ``VLLM_SPANS_TEST_MODEL`` names another one."""
    override = os.environ.get("VLLM_SPANS_TEST_MODEL")
    if override:
        return override
    from vllm_spans.embedded import ensure_model

    return str(ensure_model())


@pytest.fixture(scope="session")
def oracle_for(model_path: Callable[[str], str]) -> Callable[[str], Any]:
    """The plain-transformers oracle of a tiny model."""
    from tests.reference.models import INTERLEAVED
    from tests.reference.oracle import Oracle

    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = Oracle(model_path(name), interleaved=name in INTERLEAVED)
        return made[name]

    return get


@pytest.fixture(scope="session")
def engines() -> Iterator[Any]:
    """Engine processes by configuration, shared by the whole session."""
    from tests.engine.harness import EnginePool

    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture
def spans_engine(engines: Any, tiny_model: str) -> Any:
    """The plugin's engine with default settings and an empty prefix cache."""
    return engines.get(tiny_model)


@pytest.fixture
def stock_engine(engines: Any, tiny_model: str) -> Any:
    """Stock vLLM in a process that loads no plugin, with an empty prefix cache."""
    return engines.get(tiny_model, spans=False)


@pytest.fixture
def tiny_cache_engine(engines: Any, tiny_model: str) -> Any:
    """The plugin's engine with room for few blocks, few tokens a step and few rows."""
    return engines.get(
        tiny_model,
        num_gpu_blocks_override=44,
        max_model_len=1280,
        max_num_batched_tokens=192,
        max_num_seqs=4,
    )
