"""Prevents: hot spans that are not the hottest, that grow without bound, or that stay on the page when cold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest

from vllm_spans.exporter.page import parse
from vllm_spans.metrics.counters import EngineMetrics
from vllm_spans.metrics.stats import SpanStats
from vllm_spans.metrics.top_spans import TopSpans

keys = st.integers(0, 40).map(lambda n: n.to_bytes(2, "big"))


@given(stream=st.lists(keys, max_size=400))
def test_with_room_for_all_the_counts_are_exact(stream: list[bytes]) -> None:
    top = TopSpans(capacity=64, top=5)
    top.add(stream)
    counts = Counter(stream)
    found = top.take() or {}
    assert all(counts[key] == count for key, count in found.items())
    several = sorted((count for count in counts.values() if count > 1), reverse=True)
    assert sorted(found.values(), reverse=True) == several[:5]
    assert top.take() is None


@given(stream=st.lists(keys, min_size=1, max_size=400), parts=st.integers(1, 7))
def test_without_room_no_count_is_too_high_and_no_frequent_key_is_missed(
    stream: list[bytes], parts: int
) -> None:
    top = TopSpans(capacity=8, top=4)
    counts: Counter[bytes] = Counter()
    for start in range(0, len(stream), parts):
        top.add(stream[start : start + parts])
        counts.update(stream[start : start + parts])
        for key, count in (top.take() or {}).items():
            assert 1 < count <= counts[key]
        assert len(top._counts) <= 8
        assert top._top.keys() <= top._counts.keys()
        assert len(top._heap) == len(top._counts) == len(top._uncertain)
    for key, count in counts.items():
        if count > len(stream) / 8:
            assert key in top._counts
    assert len(top._top) <= 4
    assert all(top._certain(key) == count for key, count in top._top.items())


def test_a_flood_of_new_documents_does_not_hide_the_hot_ones() -> None:
    top = TopSpans()
    for number in range(20_000):
        top.add([number.to_bytes(4, "big"), b"hot%d" % (number % 10)])
    found = top.take()
    assert found is not None
    assert {key for key in found if key.startswith(b"hot")} == {b"hot%d" % n for n in range(10)}
    assert all(found[b"hot%d" % n] == 2000 for n in range(10))


def request(*spans: bytes) -> SimpleNamespace:
    """A request whose spans have these keys, as far as the counters look at it."""
    plan = SimpleNamespace(lookup_tokens=0, reused_tokens=0, isolated_tokens=0, gap_tokens=0)
    return SimpleNamespace(
        counted=False,
        plan=plan,
        loaded_tokens={},
        policy=SimpleNamespace(name="legolink"),
        prompt_tokens=0,
        pad_tokens=0,
        keys=SimpleNamespace(span_keys=[(b"first block", span * 32) for span in spans]),
    )


def page_spans() -> dict[str, float]:
    return parse(generate_latest(REGISTRY)).hot_spans


def test_spans_reach_the_page_and_leave_it() -> None:
    stats, metrics = SpanStats(), EngineMetrics("hot-model", 7)
    stats.count_plan(request(b"\xaa", b"\xbb", b"\xaa"))  # type: ignore[arg-type]
    metrics.add(stats.take() or {})
    assert page_spans() == {}, "spans asked for once would be new series at every request"
    again = request(b"\xaa")
    stats.count_plan(again)  # type: ignore[arg-type]
    stats.count_plan(again)  # type: ignore[arg-type]
    metrics.add(stats.take() or {})
    assert page_spans() == {"aa" * 6: 2}
    assert stats.take() is None, "idle moves something"
    metrics.add({"hot_span_requests/cc": 9, "requests/warm": 1})
    assert page_spans() == {"cc": 9}
    metrics.add({"requests/warm": 1})
    assert page_spans() == {"cc": 9}
    metrics.add({"hot_span_requests/": 0})
    assert page_spans() == {}


def test_several_api_servers_leave_the_metric_out(tmp_path: object) -> None:
    code = (
        "from vllm_spans.metrics.counters import EngineMetrics\n"
        "from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess\n"
        "EngineMetrics('m', 0).add({'hot_span_requests/cc': 9, 'requests/warm': 1})\n"
        "shared = CollectorRegistry(); multiprocess.MultiProcessCollector(shared)\n"
        "text = generate_latest(shared).decode() + generate_latest(REGISTRY).decode()\n"
        "assert 'hot_span' not in text and 'requests_total' in text, text\n"
    )
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=120)
