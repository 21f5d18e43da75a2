"""Prevents: numbers of a run told wrong, failures that are not named, an unreadable terminal."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from vllm_spans.warm.progress import (
    Reporter,
    Tally,
    format_duration,
    progress_line,
    summary,
)


def a_tally() -> Tally:
    return Tally(
        documents=10,
        size=1000,
        done_size=250,
        cached=1,
        computed=2,
        duplicates=1,
        failures=[("a.txt", "is empty")],
        tokens=3072,
        pads=100,
        found_tokens=Counter(gpu=1024),
        computed_tokens=2048,
        requests=2,
        kv_bytes_per_token=1024,
        kv_cache_tokens=4096,
        seconds=20.0,
    )


def test_progress_tells_rate_and_time_left() -> None:
    line = progress_line(a_tally())
    assert line == (
        "5/10 documents, 1 failed, tokens: 2,048 computed, 1,024 cached, 102 tokens/s, 1:00 left"
    )
    assert progress_line(Tally(10, 1000)).endswith("? left")


def test_summary_adds_up() -> None:
    tally = a_tally()
    text = summary(tally)
    assert "10: 2 computed, 1 already cached, 1 duplicates, 1 failed, 5 not reached" in text
    assert "3,072 (100 of them pads): 2,048 computed, 1,024 already cached" in text
    assert "3.0 MiB, 1,024 bytes a token" in text
    assert "20.0 s, 2 requests, 102 tokens/s" in text
    assert "warning" not in text and "ended early" not in text
    answer = tally.as_dict()
    assert answer["kv_bytes"] == 3072 * 1024
    assert sum(answer["documents"][kind] for kind in ("computed", "already_cached")) == 3
    assert answer["failures"] == [{"document": "a.txt", "reason": "is empty"}]


def test_summary_tells_where_tokens_were() -> None:
    tally = a_tally()
    assert "found" not in summary(tally), "there is one place only"
    tally.found_tokens = Counter(gpu=256, cpu=512, file=256)
    assert (
        "found      256 in the KV cache (256.0 KiB), 512 in CPU memory (512.0 KiB), 256 in files "
        "(256.0 KiB)" in summary(tally)
    )
    answer = tally.as_dict()
    assert answer["tokens"]["already_cached"] == 1024
    assert sum(answer["tokens"]["by_source"].values()) == tally.tokens
    assert answer["kv_bytes_by_source"]["computed"] == 2048 * 1024
    assert sum(answer["kv_bytes_by_source"].values()) == tally.kv_bytes


def test_summary_warns_of_a_cache_that_is_too_small() -> None:
    tally = a_tally()
    tally.kv_cache_tokens = 3071
    tally.ended_by = "no answer"
    text = summary(tally)
    assert "holds 3,071 tokens, fewer than these spans" in text
    assert text.endswith("ended early: no answer")


def test_summary_of_a_server_that_does_not_tell_sizes() -> None:
    tally = a_tally()
    tally.kv_bytes_per_token = tally.kv_cache_tokens = None
    assert "KV" not in summary(tally)
    assert tally.as_dict()["kv_bytes"] is None


def test_a_terminal_keeps_one_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = io.StringIO()
    reporter = Reporter(stream, rewrites=True)
    reporter.progress(a_tally())
    reporter.failure("b.txt", "is empty")
    reporter.progress(a_tally())
    reporter.close()
    assert "b.txt: is empty\n" in stream.getvalue()
    lines = [part for part in stream.getvalue().replace("\n", "\r").split("\r") if part.strip()]
    assert all(len(line) < 30 for line in lines)
    assert stream.getvalue().endswith(" \r")


def test_a_file_gets_whole_lines_and_few_failures() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream, rewrites=False)
    reporter.progress(a_tally())
    for index in range(30):
        reporter.failure(f"{index}.txt", "is empty")
    assert "\r" not in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert lines[0] == progress_line(a_tally())
    assert len(lines) == 22
    assert "--json" in lines[-1]
    quiet = io.StringIO()
    Reporter(quiet, rewrites=True, quiet=True).progress(a_tally())
    assert quiet.getvalue() == ""


def test_durations() -> None:
    assert [format_duration(s) for s in (0.4, 65, 3725)] == ["0:00", "1:05", "1:02:05"]
