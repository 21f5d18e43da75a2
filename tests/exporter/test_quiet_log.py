"""Prevents: a fleet that fails writing the same lines at every scrape, or hiding what is new."""

from __future__ import annotations

import logging

import pytest

from vllm_spans.exporter.quiet_log import QuietLog


def test_lines_are_written_when_they_change_and_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = QuietLog(logging.getLogger("quiet"), again=100.0, most=3, clock=lambda: now[0])
    caplog.set_level(logging.INFO)
    log.well("a", "answers")
    for _ in range(5):
        log.say("a", "timeout")
    now[0] = 10.0
    log.well("a", "answers")
    log.well("a", "answers")
    assert caplog.messages == ["a: timeout", "a: answers"]
    now[0] = 200.0
    caplog.clear()
    log.say("a", "timeout")
    now[0] = 310.0
    log.say("a", "timeout")
    log.forget("a")
    log.say("a", "timeout")
    assert caplog.messages == ["a: timeout"] * 3
    caplog.clear()
    for name in "bcdef":
        log.say(name, "timeout")
    assert caplog.messages == ["b: timeout"]
    now[0] = 400.0
    log.say("g", "timeout")
    assert caplog.messages == ["b: timeout", "4 lines were left out", "g: timeout"]
