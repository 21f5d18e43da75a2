"""Prevents: storage that is slow, or not for the engine's user, ending the engine, changing an answer, holding others
up, or going uncounted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import BLOCK
from tests.engine.harness import Engine, assert_same
from tests.offload.engines import (
    assert_nothing_left,
    block_files,
    connector,
    forget,
    moved,
    probe,
)
from tests.offload.slow_files import SlowFolder, slow_folder
from tests.offload.test_faults import make_case

NOBODY = 65534


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user can get to, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-spans-"))
    folder.chmod(0o777)
    yield folder
    allow(folder)
    shutil.rmtree(folder)


def allow(folder: Path) -> None:
    """Let everybody do everything in a folder."""
    folder.chmod(0o777)
    for path in sorted(folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


@pytest.fixture
def engine(engines: Any, tiny_model: str, open_folder: Path) -> Iterator[Engine]:
    """An engine that starts as who runs the tests, and goes on as somebody else if that is root."""
    engine = engines.get(
        tiny_model, kv_transfer_config=connector(cpu_memory="32MiB", files=str(open_folder))
    )
    yield engine
    allow(open_folder)
    become(engine, os.geteuid())


def become(engine: Engine, user: int) -> None:
    """Root is above all permissions, so its engine works for nobody; other users are their own."""
    if os.geteuid() == 0:
        probe(engine, "change_user", number=user)


def failures(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    return {name: n for name, n in moved(engine, before).items() if "failures" in name}


def test_a_folder_that_may_only_be_read(
    spans_engine: Engine, engine: Engine, open_folder: Path
) -> None:
    old, new = make_case(401), make_case(402)
    expected, expected_new = (spans_engine.one(case.request()) for case in (old, new))
    engine.one(old.request())
    forget(engine, cpu=True)
    stored = block_files(open_folder)
    for path in [open_folder, *open_folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    become(engine, NOBODY)
    before = probe(engine, "counters")
    assert_same(expected, engine.one(old.request()), "read-only")
    counts = moved(engine, before)
    assert counts["reused_tokens/file"] > 0 and not counts.get("isolated_tokens")
    assert_same(expected_new, engine.one(new.request()), "read-only, computed")
    blocks = len(new.tokens) // BLOCK
    failed = failures(engine, before)
    assert set(failed) == {"store_failures/permission"}
    assert failed["store_failures/permission"] >= blocks
    assert block_files(open_folder) == stored
    assert not list(open_folder.rglob(".tmp-*"))
    forget(engine)
    assert engine.one(new.request())["cached"] == blocks * BLOCK, "CPU memory still works"
    assert_nothing_left(engine)


@pytest.mark.parametrize("what", ["files", "folder"])
def test_what_may_not_be_read(
    spans_engine: Engine, engine: Engine, open_folder: Path, what: str
) -> None:
    """Every second file, or the whole folder: that much is computed, and the files stay for those who may."""
    case = make_case(410 + len(what))
    expected = spans_engine.one(case.request())
    shutil.rmtree(open_folder / "v1", ignore_errors=True)
    engine.one(case.request())
    forget(engine, cpu=True)
    stored = block_files(open_folder)
    for path in stored[::2] if what == "files" else [open_folder / "v1"]:
        path.chmod(0)
    become(engine, NOBODY)
    before = probe(engine, "counters")
    assert_same(expected, engine.one(case.request()), what)
    counts, failed = moved(engine, before), failures(engine, before)
    assert failed["load_failures/permission"] > 0
    assert set(failed) <= {"load_failures/permission", "store_failures/permission"}
    if what == "files":
        assert counts["reused_tokens/file"] > 0
    else:
        assert counts["lookup_tokens"] == counts["isolated_tokens"]
    become(engine, os.geteuid())
    allow(open_folder)
    assert block_files(open_folder) == stored
    forget(engine, cpu=True)
    assert engine.one(case.request())["cached"] == len(case.tokens) // BLOCK * BLOCK
    assert_nothing_left(engine)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowFolder]:
    with slow_folder(tmp_path_factory.mktemp("slow")) as folder:
        yield folder


@pytest.fixture
def slow_engine(engines: Any, tiny_model: str, slow: SlowFolder) -> Iterator[Engine]:
    """An engine with files on slow storage, and a KV cache for two or three requests."""
    engine = engines.get(
        tiny_model,
        num_gpu_blocks_override=48,
        max_model_len=1280,
        kv_transfer_config=connector(
            cpu_memory="32MiB", files=str(slow.path), load_timeout=60, file_threads=2
        ),
    )
    yield engine
    slow.take(0)


def test_storage_slower_than_the_timeout(
    spans_engine: Engine, slow_engine: Engine, slow: SlowFolder
) -> None:
    """What has not come is computed; a request beside it does not wait; later the files are used again."""
    case, other = make_case(421), make_case(422, 1)
    expected, quick = spans_engine.many([case.request(), other.request()])
    slow_engine.one(case.request())
    forget(slow_engine, cpu=True)
    slow.take(3)
    probe(slow_engine, "be_patient", seconds=1)
    before = probe(slow_engine, "counters")
    answer = slow_engine.call(
        "tests.offload.probes:overtake",
        slow=case.request(id="slow"),
        quick=other.request(id="quick"),
    )
    slow.take(0)
    assert answer["order"] == ["quick", "slow"]
    assert_same(expected, answer["results"]["slow"], "slow storage")
    assert_same(quick, answer["results"]["quick"], "beside slow storage")
    counts = moved(slow_engine, before)
    assert counts["load_failures/timeout"] >= 1
    assert {name for name in counts if "failures" in name} == {"load_failures/timeout"}
    probe(slow_engine, "be_patient")
    forget(slow_engine, cpu=True)
    assert slow_engine.one(case.request())["cached"] == len(case.tokens) // BLOCK * BLOCK
    assert_nothing_left(slow_engine)


@pytest.mark.parametrize("do", ["abort", "preempt", "reset_running"])
@pytest.mark.parametrize("kind", ["spans", "plain"])
def test_in_the_middle_of_slow_reads(
    spans_engine: Engine, slow_engine: Engine, slow: SlowFolder, do: str, kind: str
) -> None:
    """A request has found a part in CPU memory and waits for files with the rest, while another one runs."""
    case, other = make_case(431), make_case(432, 2)
    request = case.request() if kind == "spans" else case.plain()
    beside = other.request(at=1, max_tokens=12)
    expected, expected_other = (spans_engine.one({**r, "at": 0}) for r in (request, beside))
    for used in (request, {**beside, "at": 0}):
        slow_engine.one(used)
    free = slow_engine.free()
    for at in (3, 20, 50):
        forget(slow_engine)
        probe(slow_engine, "evict_rows", share=0.5, seed=at)
        slow.take(0.02)
        events = [{"at": at + 2 * number, "do": do, "ids": ["r0"]} for number in range(3)]
        run = slow_engine.run([request, beside], events)
        slow.take(0)
        assert_same(expected_other, run["results"]["r1"], f"{do} at {at}")
        if do != "abort":
            assert_same(expected, run["results"]["r0"], f"{do} at {at}")
        assert_nothing_left(slow_engine)
        assert slow_engine.free() == free
    forget(slow_engine)
    assert_same(expected, slow_engine.one(request), f"after {do}")
