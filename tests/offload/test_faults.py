"""Prevents: a fault of a tier that ends the engine, gives a wrong answer, holds others up, or goes uncounted."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import BLOCK, Case, tokens
from tests.engine.harness import TOLERANCE, Engine, assert_same, difference
from tests.offload.engines import (
    assert_nothing_left,
    block_files,
    connector,
    forget,
    moved,
    probe,
)
from tests.offload.stores import small_file_system
from vllm_spans.offload.file_format import HEADER_SIZE
from vllm_spans.offload.file_store import verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faulty")


@pytest.fixture
def engine(engines: Any, tiny_model: str, folder: Path) -> Any:
    """An engine with a file tier of its own, and a KV cache for two or three requests.

    It is patient: on a busy machine files are slow too. Tests that wait in vain take its patience away.
    """
    engine = engines.get(
        tiny_model,
        num_gpu_blocks_override=48,
        max_model_len=1280,
        kv_transfer_config=connector(
            cpu_memory="32MiB", files=str(folder), load_timeout=60, file_threads=2
        ),
    )
    probe(engine, "be_patient")
    return engine


def make_case(seed: int, spans: int = 3) -> Case:
    rng = random.Random(seed)
    case = Case().prefix(tokens(rng, BLOCK))
    for _ in range(spans):
        case.span(tokens(rng, 4 * BLOCK))
    return case.cross(tokens(rng, 15))


def rewritten(data: bytearray, change: Callable[[bytearray], None]) -> bytearray:
    """A file whose header was changed and is whole."""
    change(data)
    check = zlib.crc32(data[: HEADER_SIZE - 4])
    data[HEADER_SIZE - 4 : HEADER_SIZE] = check.to_bytes(4, "little")
    return data


def put(data: bytearray, at: int, value: bytes) -> None:
    data[at : at + len(value)] = value


DAMAGE: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "checksum": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "header": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "format": lambda data: b"something else" * 100,
    "version": lambda data: rewritten(data, lambda d: put(d, 8, b"\x07")),
    "dtype": lambda data: rewritten(data, lambda d: put(d, 12, b"bfloat16")),
    "model": lambda data: rewritten(data, lambda d: put(d, 28, bytes(32))),
    "geometry": lambda data: rewritten(data, lambda d: put(d, 60, bytes(32))),
    "key": lambda data: rewritten(data, lambda d: put(d, 92, bytes(32))),
}


@pytest.mark.parametrize("reason", sorted(DAMAGE))
def test_damaged_files(spans_engine: Engine, engine: Engine, folder: Path, reason: str) -> None:
    """Every second file is damaged: that many loads fail, and the files are written anew."""
    shutil.rmtree(folder)
    folder.mkdir()
    forget(engine, cpu=True)
    case = make_case(sum(reason.encode()))
    expected = spans_engine.one(case.request())
    engine.one(case.request())
    forget(engine, cpu=True)
    files = block_files(folder)
    damaged = files[::2]
    for path in damaged:
        path.write_bytes(DAMAGE[reason](bytearray(path.read_bytes())))
    before = probe(engine, "counters")
    assert_same(expected, engine.one(case.request()), reason)
    counts = moved(engine, before)
    failures = {name: count for name, count in counts.items() if "failures" in name}
    # The isolated KV under a gap has a file too, and is not read for a repeated request.
    assert set(failures) == {f"load_failures/{reason}"}
    assert 0 < failures[f"load_failures/{reason}"] <= len(damaged)
    assert counts["reused_tokens/file"] > 0
    forget(engine, cpu=True)
    assert_same(expected, engine.one(case.request()), f"after {reason}")
    again = moved(engine, before)
    assert again[f"load_failures/{reason}"] == failures[f"load_failures/{reason}"]
    assert len([path for path in block_files(folder) if sound(path)]) >= len(files) - len(
        damaged
    ) + int(failures[f"load_failures/{reason}"])
    assert_nothing_left(engine)


def sound(path: Path) -> bool:
    try:
        verify(path)
    except Exception:
        return False
    return True


def test_the_folder_is_removed_while_serving(
    spans_engine: Engine, engine: Engine, folder: Path
) -> None:
    case = make_case(21)
    expected = spans_engine.one(case.request())
    engine.one(case.request())
    forget(engine, cpu=True)
    shutil.rmtree(folder)
    assert_same(expected, engine.one(case.request()), "without the folder")
    probe(engine, "settle")
    assert block_files(folder), "the folder comes back with the next block"
    forget(engine, cpu=True)
    assert engine.one(case.request())["cached"] == len(case.tokens) // BLOCK * BLOCK


def test_the_folder_cannot_be_used(spans_engine: Engine, engine: Engine, folder: Path) -> None:
    """A file stands where the folder was: neither reads nor writes work."""
    case = make_case(22)
    expected = spans_engine.one(case.request())
    probe(engine, "settle")
    shutil.rmtree(folder)
    folder.write_text("")
    before = probe(engine, "counters")
    try:
        assert_same(expected, engine.one(case.request()), "no folder")
        counts = moved(engine, before)
        assert [name for name in counts if name.startswith("store_failures/")], counts
        forget(engine)
        assert engine.one(case.request())["cached"] > 0, "CPU memory still works"
    finally:
        folder.unlink()
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", ["spans", "plain"])
def test_storage_that_hangs(spans_engine: Engine, engine: Engine, folder: Path, kind: str) -> None:
    """A pipe that nobody writes to: opening it never returns. The request waits for its time, others do not wait."""
    case, other, third = make_case(23), make_case(24, 1), make_case(241)
    quick = other.request() if kind == "spans" else other.plain()
    expected, expected_quick = spans_engine.many([case.request(), quick])
    for used in (case, third):
        engine.one(used.request())
    forget(engine, cpu=True)
    key = probe(engine, "keys_of", request=case.request())[3]
    (path,) = (path for path in block_files(folder) if path.stem.startswith(key))
    path.unlink()
    os.mkfifo(path)
    probe(engine, "be_patient", seconds=0.5)
    before = probe(engine, "counters")
    answer = engine.call(
        "tests.offload.probes:overtake",
        slow=case.request(id="slow"),
        quick={**quick, "id": "quick"},
    )
    assert answer["order"] == ["quick", "slow"]
    assert_same(expected, answer["results"]["slow"], "a hanging file")
    assert_same(expected_quick, answer["results"]["quick"], "beside a hanging file")
    # Nobody waits for such storage again soon, though these files are there.
    assert engine.one(third.request())["cached"] == 0
    probe(engine, "be_patient")
    # A writer that closes at once lets the reader go: the file is empty then.
    os.close(os.open(path, os.O_WRONLY))
    counts = moved(engine, before)
    assert counts["load_failures/timeout"] >= 1
    assert counts["load_failures/truncated"] == 1
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", ["spans", "plain"])
def test_a_copy_fails_half_way(
    spans_engine: Engine, stock_engine: Engine, engine: Engine, kind: str
) -> None:
    case = make_case(25)
    request = case.request() if kind == "spans" else case.plain()
    reference = spans_engine if kind == "spans" else stock_engine
    expected = reference.one(request)
    free = engine.free()
    engine.one(request)
    forget(engine)
    before = probe(engine, "counters")
    probe(engine, "fail_copies")
    try:
        assert_same(expected, engine.one(request), "the copies fail")
    finally:
        probe(engine, "restore_copies")
    counts = moved(engine, before)
    assert counts["load_failures/copy"] == len(case.tokens) // BLOCK
    if kind == "spans":
        assert counts["lookup_tokens"] == counts["isolated_tokens"], "counted as it went"
    assert_nothing_left(engine)
    assert engine.free() == free
    forget(engine)
    assert_same(expected, engine.one(request), "after the copies failed")


@pytest.mark.parametrize("at", [1, 2, 4, 40])
@pytest.mark.parametrize("kind", ["spans", "plain"])
def test_an_abort_during_a_load(engine: Engine, spans_engine: Engine, kind: str, at: int) -> None:
    """Its blocks stay held until the load has ended: those who come next and need them are not written over."""
    case = make_case(26)
    request = case.request() if kind == "spans" else case.plain()
    others = [make_case(27, 6).request(at=at), make_case(270).request(at=at)]
    expected = spans_engine.one(request)
    spans_engine.reset()
    expected_others = [spans_engine.one({**other, "at": 0}) for other in others]
    engine.one(request)
    forget(engine)
    free = engine.free()
    probe(engine, "slow_copies", seconds=0.01)
    try:
        run = engine.run([request, *others], [{"at": at, "do": "abort", "ids": ["r0"]}])
        assert_nothing_left(engine)
    finally:
        probe(engine, "restore_copies")
    for number, other in enumerate(expected_others, 1):
        assert_same(other, run["results"][f"r{number}"], f"beside an abort, request {number}")
    assert engine.free() == free
    assert_same(expected, engine.one(request), "after an abort")


def test_resets_and_preemptions_during_a_load(engine: Engine, spans_engine: Engine) -> None:
    """A reset is refused while a load runs, and never raises; afterwards it works as ever."""
    case = make_case(28)
    expected = spans_engine.one(case.request())
    engine.one(case.request())
    refused = 0
    for at in (1, 2, 3, 5):
        for kind in ("reset", "reset_running", "preempt"):
            forget(engine)
            probe(engine, "slow_copies", seconds=0.02)
            try:
                run = engine.run([case.request(), case.plain(at=1)], [{"at": at, "do": kind}])
            finally:
                probe(engine, "restore_copies")
            refused += run["events"] == [False]
            assert_same(expected, run["results"]["r0"], f"{kind} at {at}")
    assert refused
    assert_nothing_left(engine)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path, "600k") as folder:
        yield folder


def test_a_full_disk(spans_engine: Engine, tiny_model: str, small_disk: Path) -> None:
    case = make_case(29)
    expected = spans_engine.one(case.request())
    engine = Engine(
        tiny_model, kv_transfer_config=connector(cpu_memory="16MiB", files=str(small_disk))
    )
    try:
        assert_same(expected, engine.one(case.request()), "disk full")
        counts = probe(engine, "counters")
        assert counts["vllm_spans_store_failures_total/no_space"] > 0
        stored = block_files(small_disk)
        assert stored and all(sound(path) for path in stored)
        assert not list(small_disk.rglob(".tmp-*"))
        forget(engine, cpu=True)
        assert_same(expected, engine.one(case.request()), "from a full disk")
        assert_nothing_left(engine)
    finally:
        engine.close()


def test_a_cpu_tier_smaller_than_a_request(cramped_engine: Engine, spans_engine: Engine) -> None:
    """What does not fit is counted, and costs its computation."""
    rng = random.Random(31)
    case = Case().prefix(tokens(rng, BLOCK))
    for _ in range(6):
        case.span(tokens(rng, 4 * BLOCK))
    request = case.cross(tokens(rng, 9)).request()
    expected = spans_engine.one(request)
    for _ in range(3):
        assert_same(expected, cramped_engine.one(request), "a small tier")
        forget(cramped_engine)
    counts = probe(cramped_engine, "counters")
    assert counts["vllm_spans_store_failures_total/tier_full"] > 0
    assert_nothing_left(cramped_engine)


def test_a_loaded_prefix_and_spans_do_not_wait_for_each_other(
    engine: Engine, spans_engine: Engine
) -> None:
    """A prefix is being loaded, its request needs many more blocks, and requests with spans want all that is free."""
    rng = random.Random(32)
    prefix = tokens(rng, BLOCK)
    plain = {"tokens": prefix + tokens(rng, 8 * BLOCK + 9)}
    requests = [plain, *(make_case(320 + number).request(at=20) for number in range(4))]
    for request in ({"tokens": [*prefix, 7]}, *requests[1:]):
        engine.one({**request, "at": 0})
    forget(engine)
    probe(engine, "slow_copies", seconds=0.02)
    try:
        run = engine.run(requests)
    finally:
        probe(engine, "restore_copies")
    assert run["results"]["r0"]["cached"] == BLOCK
    for number, request in enumerate(requests):
        spans_engine.reset()
        expected = spans_engine.one({**request, "at": 0})
        assert_same(expected, run["results"][f"r{number}"], f"request {number}")
    assert_nothing_left(engine)


@pytest.mark.parametrize("told", [True, False])
def test_rotated_pages_of_loaded_blocks(engine: Engine, spans_engine: Engine, told: bool) -> None:
    """Blocks come back with other content under the same number: what was rotated of them before is stale.

    Told of the load, the backend rotates them again; not told, the answer is wrong, so the test can see it.
    """
    cases = [make_case(330 + number) for number in range(4)]
    expected = [spans_engine.one(case.request()) for case in cases]
    for case in cases:
        engine.one(case.request())
    worst = 0.0
    if not told:
        probe(engine, "keep_rotated_pages")
    try:
        for _ in range(2):
            for case, answer in zip(cases, expected, strict=True):
                forget(engine)
                worst = max(worst, difference(answer, engine.one(case.request())))
    finally:
        if not told:
            probe(engine, "drop_rotated_pages")
    if told:
        assert worst <= TOLERANCE
    else:
        assert worst > 100 * TOLERANCE
        # Nothing that was computed over stale pages may be found later.
        probe(
            engine,
            "lose",
            keys=[k for c in cases for k in probe(engine, "keys_of", request=c.request())],
        )
        forget(engine, cpu=True)
