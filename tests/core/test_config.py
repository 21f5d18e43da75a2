"""Prevents a setting from being ignored: an unknown name or an unusable value stops the start and is named."""

import pytest

from vllm_spans.config import SpansConfig, SpansConfigError, setting_names, spans_enabled


def env(**values: str) -> dict[str, str]:
    return {f"VLLM_V1_SPANS_{name}": value for name, value in values.items()} | {"PATH": "/bin"}


def test_defaults_and_both_sources() -> None:
    assert SpansConfig.from_sources({}) == SpansConfig()
    config = SpansConfig.from_sources(
        env(
            GAP_POLICY="none",
            GAP_LENGTH="64",
            DEBUG="1",
            TOKEN_PLUS="5",
            TOKEN_CROSS="6",
            DELIMITER="<|span|>",
        ),
        {"spans": {"gap_policy": "legolink"}, "other": 1},
    )
    assert config == SpansConfig(
        gap_policy="legolink",
        gap_length=64,
        debug=True,
        token_plus=5,
        token_cross=6,
        delimiter="<|span|>",
    )


@pytest.mark.parametrize(
    ("environ", "additional", "says"),
    [
        (env(GAP_POLICIE="none"), None, "VLLM_V1_SPANS_GAP_POLICIE is not a setting"),
        (env(GAP_POLICY="legolonk"), None, "legolonk.*none, legolink, full"),
        (env(GAP_LENGTH="many"), None, "GAP_LENGTH.*whole number"),
        (env(GAP_LENGTH="0"), None, "GAP_POLICY=none"),
        (env(MAX_SPANS="0"), None, "at least 1"),
        (env(DEBUG="perhaps"), None, "must be 1 or 0"),
        (env(TOKEN_PLUS="3", TOKEN_CROSS="3"), None, "must differ"),
        (env(TOKEN_CROSS="3"), None, "without VLLM_V1_SPANS_TOKEN_PLUS"),
        (env(TOKEN_PLUS="-1"), None, "0 or larger"),
        ({}, {"spans": {"gaps": 3}}, "unknown key 'gaps'"),
        ({}, {"spans": {"enabled": True}}, "set VLLM_V1_SPANS_ENABLED=1"),
        ({}, {"spans": {"gap_length": 32.5}}, "whole number"),
        ({}, {"spans": [1]}, "object of settings"),
    ],
)
def test_mistakes_are_named(environ: dict[str, str], additional: dict | None, says: str) -> None:
    with pytest.raises(SpansConfigError, match=says):
        SpansConfig.from_sources(environ, additional)


def test_gap_length_fits_the_block_size() -> None:
    assert SpansConfig().resolve(16).gap_length == 32
    assert SpansConfig().resolve(64).gap_length == 64
    assert SpansConfig(gap_length=96).resolve(32).gap_length == 96
    with pytest.raises(SpansConfigError, match=r"multiple of the block size 32.*Use 64"):
        SpansConfig(gap_length=40).resolve(32)


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("true", True), ("0", False), ("", False), ("no", False)]
)
def test_the_switch(text: str, on: bool) -> None:
    assert spans_enabled({"VLLM_V1_SPANS_ENABLED": text}) is on


def test_the_switch_takes_no_third_value() -> None:
    with pytest.raises(SpansConfigError, match="must be 1 or 0"):
        spans_enabled({"VLLM_V1_SPANS_ENABLED": "maybe"})


def test_every_setting_has_a_variable() -> None:
    assert (
        "VLLM_V1_SPANS_GAP_POLICY" in setting_names() and "VLLM_V1_SPANS_ENABLED" in setting_names()
    )


def test_our_log_lines_go_where_vllms_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM configures the logger ``vllm`` alone, after the plugin is loaded; without it no line of ours is seen."""
    import logging

    from vllm_spans.plugin import _log_with_vllm

    ours, theirs = logging.getLogger("vllm_spans"), logging.getLogger("vllm")
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    monkeypatch.setattr(ours, "parent", logging.getLogger())
    monkeypatch.setattr(theirs, "handlers", [])
    monkeypatch.setattr(theirs, "propagate", False)
    level = theirs.level
    try:
        _log_with_vllm()
        theirs.setLevel(logging.INFO)
        theirs.addHandler(Handler())
        logging.getLogger("vllm_spans.anything").info("a line")
        logging.getLogger("vllm_spans.anything").debug("no line")
    finally:
        theirs.setLevel(level)
    assert lines == ["a line"]
