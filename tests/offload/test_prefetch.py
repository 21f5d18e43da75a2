"""Prevents: reading ahead what nobody can use, more than its share of CPU memory, or the same files again and again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from vllm_spans.offload.cost import ENOUGH, CostModel
from vllm_spans.offload.prefetch import Prefetch

RUNS = st.lists(st.lists(st.binary(min_size=1, max_size=1), max_size=6), max_size=5)


class Storage:
    """Keys in CPU memory and in files; whether there is a file is known two questions later."""

    def __init__(self, cpu: set[bytes], files: set[bytes], rows: int) -> None:
        self.cpu, self.files, self.rows = cpu, files, rows
        self.asked: dict[bytes, int] = {}
        self.read: list[bytes] = []
        self.touched: list[bytes] = []

    def locate(self, key: bytes, context: ReqContext) -> LookupResult:
        if key in self.cpu:
            return LookupResult.HIT
        if key in self.read:
            return LookupResult.HIT_PENDING
        self.asked[key] = self.asked.get(key, 0) + 1
        if self.asked[key] < 3:
            return LookupResult.RETRY
        return LookupResult.HIT_PENDING if key in self.files else LookupResult.MISS

    def fetch(self, key: bytes, context: ReqContext) -> LookupResult:
        assert key in self.files
        if key in self.read:
            return LookupResult.HIT_PENDING
        if len(self.read) >= self.rows:
            return LookupResult.MISS
        self.read.append(key)
        return LookupResult.HIT_PENDING

    def touch(self, keys: list[bytes], context: ReqContext) -> None:
        assert self.cpu.issuperset(keys)
        self.touched += keys

    def prefetch(self, cost: CostModel | None, rows: int) -> Prefetch:
        return Prefetch(self.locate, self.fetch, self.touch, cost, rows)


def wait(prefetch: Prefetch, name: str, runs: list[list[bytes]], prefix: bool) -> None:
    for _ in range(4 + sum(map(len, runs))):
        prefetch.advance(name, ReqContext(name), lambda: runs, prefix)


@given(RUNS, st.sets(st.binary(max_size=1)), st.sets(st.binary(max_size=1)), st.booleans())
def test_exactly_what_is_of_use_is_read(
    runs: list[list[bytes]], cpu: set[bytes], files: set[bytes], prefix: bool
) -> None:
    keys = list(dict.fromkeys(key for run in runs for key in run))
    storage = Storage(cpu, files, rows=10**6)
    wait(storage.prefetch(None, 10**6), "r", runs, prefix)
    useful = []
    for key in (key for run in runs for key in run):
        if key in cpu or key in files:
            useful.append(key)
        elif prefix:
            break
    assert storage.read == [k for k in dict.fromkeys(useful) if k in files and k not in cpu]
    assert set(storage.touched) == {key for key in useful if key in cpu}
    assert all(storage.asked.get(key, 0) <= 8 for key in keys[1:])


@given(
    st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(0, 60),
    st.integers(0, 20),
    st.data(),
)
def test_the_share_is_kept_and_given_back(
    requests: list[list[int]], rows: int, free: int, data: st.DataObject
) -> None:
    """Requests come, are planned and end in any order; a row that is not there is not counted."""
    every = {number.to_bytes(2, "big") for number in range(256)}
    storage = Storage(set(), every, free)
    prefetch = storage.prefetch(None, rows)
    share = rows // 4
    asked = {
        str(index): [[n.to_bytes(2, "big") for n in dict.fromkeys(numbers)]]
        for index, numbers in enumerate(requests)
    }
    names = list(asked)
    for _ in range(12):
        for name in names:
            prefetch.advance(name, ReqContext(name), lambda name=name: asked[name], False)  # type: ignore[misc]
        taken = sum(ahead.rows for ahead in prefetch._requests.values())
        assert taken + prefetch._room == share
        assert len(storage.read) <= free
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(names))
            (prefetch.hand_over if data.draw(st.booleans()) else prefetch.forget)(name)
    for name in names:
        prefetch.forget(name)
    assert prefetch._room == share
    assert not prefetch._requests


def test_a_request_that_is_planned_is_not_read_ahead_any_more() -> None:
    storage = Storage(set(), {b"a"}, rows=10)
    prefetch = storage.prefetch(None, 100)
    prefetch.advance("r", ReqContext("r"), lambda: [[b"a"]], False)
    prefetch.hand_over("r")
    wait(prefetch, "r", [[b"a"]], False)
    assert not storage.read
    prefetch.forget("r")
    wait(prefetch, "r", [[b"a"]], False)
    assert storage.read == [b"a"], "after a preemption it waits again"


def test_what_does_not_pay_from_cpu_memory_is_not_read() -> None:
    """However slow files are, they are read while nobody waits; only the copy counts."""
    cost = CostModel(1, 1)
    for size in range(1, ENOUGH + 1):
        cost.add_load("cpu", size, 10.0)
        cost.add_load("file", size, 1000.0)
        cost.add_step(size, size)
    storage = Storage(set(), {bytes([n]) for n in range(40)}, rows=100)
    small, large = [[bytes([n]) for n in range(3)]], [[bytes([n]) for n in range(10, 30)]]
    prefetch = storage.prefetch(cost, 400)
    wait(prefetch, "small", small, False)
    assert not storage.read
    wait(prefetch, "large", large, False)
    assert storage.read == large[0]
