"""Prevents: a knee on a GPU that is lost to a mistake that two small servers on a CPU would have shown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.gpu_knee import Ramp, main


def test_a_ramp_is_read() -> None:
    assert Ramp.parse("0.5:4:8:10") == Ramp(0.5, 4.0, 8, 10.0)


@pytest.mark.parametrize("text", ["1:2:3", "a:2:3:4", "1:2:3.5:4"])
def test_what_is_no_ramp_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="FIRST:LAST:STEPS:SECONDS"):
        Ramp.parse(text)


@pytest.mark.slow
def test_both_servers_are_measured(tmp_path: Path) -> None:
    ramp = ["1:2:2:3"]
    main(["--tiny", "--out", str(tmp_path), "--stock", *ramp, "--spans", *ramp, "--max-lag", "9"])
    found = json.loads((tmp_path / "knee.json").read_text())
    for name in ("stock", "spans"):
        assert found[name]["outcomes"] == {"ok": 9}
        assert found[name]["knee"] == 2.0
    assert found["ratio"] == 1.0
    assert (tmp_path / "report.html").exists()
