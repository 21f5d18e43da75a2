"""Prevents: a setting of the tiers that is misread or silently ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_spans.offload.settings import OffloadSettings, OffloadSettingsError


def test_either_tier_or_both(tmp_path: Path) -> None:
    cpu = OffloadSettings.from_extra_config({"cpu_memory": "1.5GiB"})
    assert (cpu.cpu_memory, cpu.files) == (3 * 1024**3 // 2, None)
    files = OffloadSettings.from_extra_config({"files": str(tmp_path)})
    assert (files.cpu_memory, files.files, files.files_limit) == (256 * 1024**2, tmp_path, None)
    both = OffloadSettings.from_extra_config(
        {
            "cpu_memory": 4096,
            "files": str(tmp_path),
            "files_limit": "2TB",
            "policy": "arc",
            "load_timeout": 1,
            "file_threads": 2,
            "load_when": "always",
        }
    )
    assert both == OffloadSettings(4096, tmp_path, 2 * 1000**4, "arc", 1.0, 2, "always")


def test_what_decides_on_loads() -> None:
    """Measured unless it is given, or nothing at all."""
    measured = OffloadSettings.from_extra_config({"cpu_memory": 4096})
    assert measured.load_when == "cheaper"
    model = measured.make_cost_model(16, 1000)
    assert model is not None
    assert not model.loads["cpu"].known and not model.loads["file"].known and not model.steps.known
    rates = {
        "cpu_bandwidth": "10GB",
        "file_bandwidth": "1MB",
        "recompute_tokens_per_second": 2000,
    }
    given = OffloadSettings.from_extra_config({"files": "/tmp", **rates}).make_cost_model(16, 1000)
    assert given is not None
    assert given.loads["cpu"].line(10**10) == given.loads["file"].line(10**6) == pytest.approx(1)
    assert given.steps.line(2000) == pytest.approx(1)
    always = OffloadSettings.from_extra_config({"cpu_memory": 4096, "load_when": "always"})
    assert always.make_cost_model(16, 1000) is None


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({}, "no tier"),
        ({"cpu_bytes": 1}, "cpu_bytes"),
        ({"cpu_memory": "4 gigs"}, "cpu_memory"),
        ({"cpu_memory": 0}, "cpu_memory"),
        ({"cpu_memory": True}, "cpu_memory"),
        ({"cpu_memory": "-1GiB"}, "cpu_memory"),
        ({"files": "relative/folder"}, "absolute"),
        ({"files": __file__}, "not a folder"),
        ({"files": ""}, "files"),
        ({"cpu_memory": 1, "files_limit": 5}, "files_limit"),
        ({"cpu_memory": 1, "policy": "fifo"}, "fifo"),
        ({"cpu_memory": 1, "load_timeout": 0}, "load_timeout"),
        ({"cpu_memory": 1, "load_timeout": "5"}, "load_timeout"),
        ({"cpu_memory": 1, "file_threads": 0}, "file_threads"),
        ({"cpu_memory": 1, "file_threads": True}, "file_threads"),
        ({"cpu_memory": 1, "load_when": "never"}, "load_when 'never' .* cheaper, always"),
        ({"cpu_memory": 1, "cpu_bandwidth": "fast"}, "cpu_bandwidth"),
        ({"cpu_memory": 1, "cpu_bandwidth": 0}, "cpu_bandwidth"),
        ({"cpu_memory": 1, "recompute_tokens_per_second": -1}, "recompute_tokens_per_second"),
        ({"cpu_memory": 1, "recompute_tokens_per_second": "9"}, "recompute_tokens_per_second"),
        ({"cpu_memory": 1, "file_bandwidth": "1GiB"}, "file_bandwidth is set without files"),
        (
            {"cpu_memory": 1, "cpu_bandwidth": "1GiB", "load_when": "always"},
            "cpu_bandwidth has no effect .* load_when",
        ),
    ],
)
def test_what_cannot_be_used_is_named(extra: dict[str, Any], names: str) -> None:
    with pytest.raises(OffloadSettingsError, match=names):
        OffloadSettings.from_extra_config(extra)
