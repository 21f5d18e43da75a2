"""The kernels on one GPU: correct first, then timed against FlashAttention 3 and vLLM's Triton attention.

    python -m benchmarks.gpu_kernels --out results.json [--sweep] [--quick]

Launch shapes of decode are swept by ``benchmarks.decode_sweep``. Times are medians over CUDA-graph replays. A case
that fails is named and the run goes on; the exit status tells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.kernel_cases import (  # noqa: E402
    LLAMA,
    PAGE,
    SMALL,
    DecodeCase,
    GatherCase,
    Shape,
    timed,
)
from vllm_spans.attention.kernels.gather_rotate import GatherConfig  # noqa: E402

KV_BUDGET = 100e9
DECODE_GOAL = 1.02
GATHER_GOAL = 1.15
BATCHES = (1, 16, 64, 256)
CONTEXTS = (1024, 4096, 16384, 65536)
GATHER_SWEEP = [
    GatherConfig(tokens, heads, warps)
    for tokens, heads, warps in itertools.product((16, 32, 64), (2, 4, 8), (4, 8))
]


class Report:
    """Rows of results, and what failed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.best: list[dict[str, Any]] = []
        self.start = time.monotonic()

    def row(
        self,
        work: str,
        stock: float | None,
        spans: float,
        floor: float,
        goal: float,
        against: float | None,
        **more: Any,
    ) -> None:
        """Add a row of microseconds; ``ratio`` is to ``against``."""
        ratio = spans / against if against else None
        self.rows.append(
            {
                "work": work,
                "stock": stock,
                "spans": spans,
                "unit": "us",
                "ratio": ratio,
                "floor": floor,
                "goal": goal,
                "met": None if ratio is None else ratio <= goal,
                **more,
            }
        )

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one case; a failure is printed and remembered, and gives ``None``."""
        try:
            return work()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.failures.append(f"{name}: {type(error).__name__}: {lines[0][:200]}")
            print(f"FAILED {self.failures[-1]}", flush=True)
            if len(self.failures) <= 5:
                traceback.print_exc(limit=3)
            return None
        finally:
            # An error on the device would fail every later case: better seen here.
            torch.cuda.synchronize()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start


def check_all(report: Report) -> None:
    """Correctness on the device, before anything is timed."""
    for shape in (LLAMA, SMALL):
        report.attempt(f"check gather {shape.name}", lambda s=shape: GatherCase(s, 8192, 1).check())
        ragged = [8192, 0, 1, 5000, 17, 8191, 64, 4096]
        cases = {"even": None, "ragged": ragged, "one long": [8192] + [1] * 7}
        for name, lengths in cases.items():
            work = f"check decode {shape.name} {name}"
            case = DecodeCase(shape, 8, 8192, lengths, seed=2)
            worst = report.attempt(work, case.check)
            if worst is not None:
                print(f"{work}: relative error {worst:.1e}", flush=True)


def bench_copy(report: Report) -> float:
    """Bytes per microsecond of a large device copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    took = report.attempt("device copy", lambda: timed(lambda: target.copy_(source)))
    rate = 2 * source.numel() / took if took else 4.3e6
    print(f"device copy: {rate / 1e6:.2f} TB/s", flush=True)
    return rate


def bench_gather(report: Report, rate: float, sweep: bool) -> None:
    """Gather-rotate at 8k, 32k and 64k tokens against a copy of as many bytes."""
    for shape, tokens in itertools.product((LLAMA, SMALL), (8192, 32768, 65536)):
        work = f"gather {shape.name} {tokens}"
        case = report.attempt(work, lambda s=shape, t=tokens: GatherCase(s, t))
        if case is None:
            continue
        source = torch.empty_like(case.key_out).flatten()
        target = torch.empty_like(source)
        copy = timed(lambda t=target, s=source: (t.copy_(s), t.copy_(s)))
        took = report.attempt(work, lambda c=case: timed(c.run))
        if took is None:
            continue
        moved = 2 * tokens * shape.token_bytes
        report.row(work, copy, took, moved / rate, GATHER_GOAL, copy, tb_per_s=moved / took / 1e6)
        if sweep and shape == LLAMA and tokens != 8192:
            found = {}
            for config in GATHER_SWEEP:
                name = f"{work} {config}"
                each = report.attempt(name, lambda c=case, g=config: timed(lambda: c.run(g), 7))
                if each is not None:
                    found[config] = each
            best_of(report, work, found)
        del case, source, target


def best_of(report: Report, work: str, found: dict[Any, float]) -> None:
    """Print the three fastest configurations and keep all."""
    ranked = sorted(found.items(), key=lambda item: item[1])
    for config, took in ranked[:3]:
        print(f"  best {work}: {took:8.1f} us {config}", flush=True)
    report.best += [{"work": work, "us": took, **asdict(config)} for config, took in ranked]


def fits(shape: Shape, batch: int, context: int) -> bool:
    """Whether the KV of a case fits the budget."""
    return batch * context * shape.token_bytes <= KV_BUDGET


def bench_decode(report: Report, rate: float, sizes: Iterable[tuple[Shape, int, int]]) -> None:
    """Decode against FlashAttention 3 and Triton unified attention."""
    for shape, batch, context in sizes:
        work = f"decode {shape.name} {batch} x {context}"
        case = report.attempt(work, lambda s=shape, b=batch, c=context: DecodeCase(s, b, c))
        if case is None:
            continue
        workspace = case.workspace()
        spans = report.attempt(work, lambda c=case, w=workspace: timed(lambda: c.spans(w)))
        bare = report.attempt(
            f"{work} without rotation",
            lambda c=case, w=workspace: timed(lambda: c.spans(w, rotate=False)),
        )
        flash = report.attempt(f"{work} FA3", lambda c=case: timed(c.flash()))
        unified = report.attempt(f"{work} Triton unified", lambda c=case: timed(c.unified(), 7))
        if spans is not None:
            floor = batch * context * shape.token_bytes / (rate)
            report.row(
                work, flash, spans, floor, DECODE_GOAL, flash, unified=unified, no_rotation=bare
            )
        del case, workspace
        torch.cuda.empty_cache()


def measure(report: Report, sweep: bool, quick: bool) -> None:
    """Check, then time."""
    check_all(report)
    print(f"checked after {report.elapsed():.0f} s", flush=True)
    if report.failures:
        print("the kernels are wrong or do not run: nothing is timed until that is understood")
    else:
        rate = bench_copy(report)
        bench_gather(report, rate, sweep)
        print(f"gather done after {report.elapsed():.0f} s", flush=True)
        batches, contexts = ((1, 64), (4096,)) if quick else (BATCHES, CONTEXTS)
        sizes = [
            (shape, batch, context)
            for shape in (LLAMA, SMALL)
            for context, batch in itertools.product(contexts, batches)
            if fits(shape, batch, context)
        ]
        bench_decode(report, rate, sizes)


def main() -> int:
    """Check, time, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="where the JSON rows go")
    parser.add_argument(
        "--sweep", action="store_true", help="try launch shapes of the gather, print the best"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    options = parser.parse_args()
    report = Report()

    try:
        measure(report, options.sweep, options.quick)
    except Exception as error:
        # An error that stays on the device ends the measuring; what there is gets written.
        traceback.print_exc()
        report.failures.append(f"ended early: {type(error).__name__}: {str(error)[:200]}")
    meta = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "page": PAGE,
        "seconds": round(report.elapsed(), 1),
        "command": " ".join(sys.argv),
        "failures": report.failures,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"meta": meta, "rows": report.rows, "sweep": report.best}, indent=1)
    )
    show(report)
    return 1 if report.failures else 0


def show(report: Report) -> None:
    """The table, short enough for the end of a log."""

    def number(value: float | None, digits: int = 0) -> str:
        return f"{value:.{digits}f}" if value is not None else "-"

    print(f"\n{'work (us)':32}{'floor':>8}{'stock':>8}{'spans':>8}{'ratio':>7}{'goal':>6}  also")
    for row in report.rows:
        also = ", ".join(
            f"{key} {number(row[key], 2 if key == 'tb_per_s' else 0)}"
            for key in ("unified", "no_rotation", "tb_per_s")
            if key in row
        )
        print(
            f"{row['work']:32}{number(row['floor']):>8}{number(row['stock']):>8}"
            f"{number(row['spans']):>8}{number(row['ratio'], 2):>7}{row['goal']:>6}  {also}"
        )
    for failure in report.failures[:10]:
        print(f"FAILED {failure}")
    print(f"{report.elapsed():.0f} s, {len(report.failures)} failed")


if __name__ == "__main__":
    sys.exit(main())
