"""Prevents: a page that is cut, foreign or hostile being half counted, or a whole one being misread."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest

from tests.exporter.engines import PAGE, engine_page
from vllm_spans.exporter.collector import COUNTER_HELP
from vllm_spans.exporter.page import COUNTERS, MAX_SERIES, Page, PageError, parse
from vllm_spans.metrics.counters import ENGINE_COUNTERS, REJECTED


def test_every_counter_that_is_read_is_one_of_the_engine() -> None:
    engine = {spec.name: spec.label for spec in (*ENGINE_COUNTERS, REJECTED)}
    assert COUNTERS.items() <= engine.items()
    assert COUNTERS.keys() == COUNTER_HELP.keys()


def test_the_page_of_a_real_engine_is_read_whole() -> None:
    counters = {"lookup_tokens": 96, "reused_tokens/file": 64, "gap_tokens/legolink": 32}
    page = parse(
        engine_page(counters, model='a "b" \\\\ c'.replace('"', '\\"'), started=17.5).encode()
    )
    assert page.model == 'a "b" \\ c'
    assert page.started == 17.5
    assert page.has_spans
    assert page.counters["lookup_tokens", ""] == 96
    assert page.counters["reused_tokens", "file"] == 64
    assert page.counters["reused_tokens", "gpu"] == 0
    assert {name for name, _ in page.counters} == COUNTERS.keys()


def test_an_engine_without_spans_is_told_from_garbage() -> None:
    lines = [line for line in PAGE.splitlines(keepends=True) if "vllm_spans_" not in line]
    page = parse("".join(lines).encode())
    assert not page.has_spans
    assert page.model == "tiny"


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_page_cut_anywhere_in_a_line_is_refused(cut: int) -> None:
    body = engine_page({"lookup_tokens": 12345}).encode()
    end = body.index(b"vllm_spans_lookup_tokens_total") + cut
    with pytest.raises(PageError):
        parse(body[:end])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"<html>log in</html>\n", "no metrics"),
        (b"# TYPE x counter\nvllm_spans_lookup_tokens_total NaN\n", "not a count"),
        (b"# TYPE x counter\nvllm_spans_lookup_tokens_total -1\n", "not a count"),
        (b"# TYPE x counter\nvllm_spans_lookup_tokens_total +Inf\n", "not a count"),
        (b"# TYPE x counter\nvllm_spans_lookup_tokens_total many\n", "not a count"),
        (b"# TYPE x counter\nvllm_spans_lookup_tokens_total\n", "not a sample"),
        (b'# TYPE x counter\nvllm_spans_gap_tokens_total{policy="x} 1\n', "not labels"),
        (b"# TYPE x counter\nvllm_spans_gap_tokens_total 1\n", "no label policy"),
        (b'# TYPE x counter\nvllm_spans_rejected_total{reason="%s"} 1\n' % (b"x" * 999), "999"),
    ],
)
def test_what_is_no_whole_page_is_refused_by_name(body: bytes, said: str) -> None:
    with pytest.raises(PageError, match=said):
        parse(body)


def test_a_page_with_endless_label_values_is_refused() -> None:
    lines = [f'vllm_spans_rejected_total{{reason="{n}"}} 1\n' for n in range(MAX_SERIES + 1)]
    with pytest.raises(PageError, match="more than"):
        parse(("# TYPE x counter\n" + "".join(lines)).encode())


def test_other_labels_are_summed_over() -> None:
    text = "# TYPE vllm_spans_gap_tokens_total counter\n" + "".join(
        f'vllm_spans_gap_tokens_total{{engine="{engine}",model_name="m",policy="none"}} 2 1700000000\n'
        for engine in range(3)
    )
    assert parse(text.encode()) == Page("m", None, {("gap_tokens", "none"): 6.0}, {})


label_text = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)


@given(values=st.dictionaries(label_text, st.integers(0, 1 << 60), max_size=6))
def test_whatever_the_client_library_writes_is_read(values: dict[str, int]) -> None:
    registry = CollectorRegistry()
    counter = Counter("vllm_spans_rejected", "x", ["reason"], registry=registry)
    for reason, value in values.items():
        counter.labels(reason).inc(value)
    read = parse(generate_latest(registry)).counters
    assert read == {("rejected", reason): float(value) for reason, value in values.items()}


@given(body=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    for whole in (body, b"# TYPE x counter\nvllm_spans_" + body + b"\n"):
        with contextlib.suppress(PageError):
            parse(whole)
