"""Launch shapes of decode against the shared memory of devices.

Prevents: a head size or KV dtype that an engine meets asks for more shared memory than its GPU has, and fails at the
first request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from vllm_spans.attention.kernels.launch import DecodeConfig, Launch, choose_launch

ROOT = Path(__file__).resolve().parents[2]
HOPPER, AMPERE, CONSUMER = 227 * 1024, 163 * 1024, 99 * 1024
HEAD_SIZES = (64, 80, 96, 128, 256)


@pytest.mark.parametrize("limit", [HOPPER, AMPERE, CONSUMER])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_shape_fits(head_size: int, itemsize: int, limit: int) -> None:
    """Whatever the heads of a rank and their queries, and without shrinking for the usual ones on Hopper."""
    padded = triton.next_power_of_2(head_size)
    for kv_heads in (1, 2, 3, 8, 16):
        for group in (1, 4, 8, 16, 32):
            launch = choose_launch(kv_heads, group, padded, itemsize, limit)
            assert launch.shared_bytes <= limit
            assert kv_heads % launch.heads == 0
            if limit == HOPPER and group <= 16:
                assert launch == choose_launch(kv_heads, group, padded, itemsize, 1 << 30)


def test_a_large_configuration_shrinks_until_it_fits() -> None:
    """Step by step, each needing less than the one before; what never fits is refused."""
    launch: Launch | None = Launch.of(DecodeConfig(64, 4, 16, 4, 2), 8, 4, 256, 4, 4)
    needs = []
    while launch is not None:
        needs.append(launch.shared_bytes)
        launch = launch.smaller(8, 4)
    assert len(needs) > 5
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == len(needs)
    with pytest.raises(ValueError, match="use a smaller KV dtype"):
        choose_launch(8, 4, 256, 4, needs[-1] - 1)


def compiled(capability: int, cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Shared memory of kernels compiled in another process, and its bounds."""
    triton_at = str(Path(triton.__file__).parents[1])
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), triton_at])
    command = [sys.executable, "-m", "tests.kernels.compile_decode"]
    done = subprocess.run(
        [*command, str(capability), json.dumps(cases)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("capability", "limit", "dtypes"),
    [(90, HOPPER, ("fp8e4nv", "bf16", "fp32")), (86, CONSUMER, ("bf16", "fp32"))],
)
def test_compiled_kernels_keep_the_bound(
    capability: int, limit: int, dtypes: tuple[str, ...]
) -> None:
    """The bound holds for what Triton makes of the kernel and is not far above it."""
    shapes = [(64, 64, 4), (128, 96, 4), (256, 256, 16), (256, 256, 32)]
    cases = [
        {"dtype": dtype, "head_size": size, "rotary_dim": rotary, "group": group, "limit": limit}
        for dtype in dtypes
        for size, rotary, group in shapes
    ]
    for case, found in zip(cases, compiled(capability, cases), strict=True):
        assert found["compiled"] <= found["bound"] <= limit, case
        assert found["bound"] < 2.0 * found["compiled"], case
