"""Launch shapes of the decode kernel on one GPU against FlashAttention 3: correct first, then the fastest.

    python -m benchmarks.decode_sweep --out sweep.json [--seconds 150] [--shapes llama tp2 tp4 tp8 head64 head256 fp8]

The sweep is over the Llama-8B shape at many sizes. The other shapes are what tensor parallelism leaves of it (4, 2, 1
KV heads), head sizes 64 and 256 and fp8 KV, at two sizes each and with few candidates. All kernels are compiled first,
in parallel processes, which leave them in Triton's cache. A configuration that does not compile, does not fit or is
wrong is named and left out. ``--seconds`` bounds the whole: cases stand in the order of their weight, and what was
measured is printed and written even if not all could be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.kernel_cases import LLAMA, DecodeCase, Shape, timed  # noqa: E402
from tests.kernels import reference  # noqa: E402
from vllm_spans.attention.kernels.decode import row_classes  # noqa: E402
from vllm_spans.attention.kernels.launch import DecodeConfig  # noqa: E402

CASES = (
    (64, 4096),
    (256, 4096),
    (16, 4096),
    (1, 4096),
    (64, 16384),
    (256, 1024),
    (64, 1024),
    (16, 16384),
    (16, 1024),
    (1, 16384),
    (1, 1024),
    (256, 16384),
)
OTHER_CASES = ((64, 4096), (16, 4096))
SCREENED = 3
"""Cases after which only configurations near the best of one of them go on."""
NEAR = 1.08
RAGGED = [1024, 0, 1, 600, 17, 1023, 64, 512]

# tokens, heads, warps, stages, registers: what is compiled; then how many programs per multiprocessor.
KERNELS = (
    (16, 2, 2, 2, 0, (4,)),
    (16, 2, 2, 2, 200, (4, 5)),
    (16, 2, 2, 2, 168, (6,)),
    (16, 4, 4, 2, 0, (2,)),
    (16, 4, 4, 2, 168, (3,)),
    (32, 2, 2, 2, 0, (4,)),
)
OTHER_KERNELS = (
    (16, 2, 2, 2, 0, (4, 6, 8)),
    (16, 2, 2, 2, 200, (5,)),
    (32, 2, 2, 2, 0, (4,)),
    (16, 4, 4, 2, 0, (2,)),
    (16, 1, 2, 2, 0, (4,)),
    (16, 1, 2, 2, 200, (5,)),
    (16, 1, 4, 2, 0, (2,)),
    (16, 1, 1, 2, 0, (8,)),
)
SMALL_HEAD_KERNELS = (
    (16, 4, 4, 2, 0, (3, 4)),
    (16, 2, 2, 2, 0, (6, 8)),
    (32, 2, 2, 2, 0, (4, 6)),
    (32, 4, 4, 2, 0, (2, 3)),
)
WIDE_HEAD_KERNELS = (
    (16, 2, 4, 2, 0, (2,)),
    (16, 1, 2, 2, 0, (4,)),
    (16, 1, 2, 2, 200, (5,)),
    (16, 1, 4, 2, 0, (2,)),
    (16, 4, 8, 2, 0, (1,)),
    (32, 1, 2, 2, 0, (3, 4)),
)
FP8_KERNELS = (
    (16, 2, 2, 2, 0, (4, 5, 6, 8)),
    (16, 4, 4, 2, 0, (2, 3)),
    (32, 2, 2, 2, 0, (4,)),
    (32, 4, 4, 2, 0, (2,)),
)


@dataclass(frozen=True)
class Target:
    """A shape to be swept."""

    name: str
    shape: Shape
    cases: tuple[tuple[int, int], ...]
    kernels: tuple[tuple[Any, ...], ...]
    fp8: bool = False

    @property
    def row_classes(self) -> set[int]:
        """Batch sizes, one of each class that a kernel is compiled for."""
        classes = row_classes(max(max(batch for batch, _ in self.cases), len(RAGGED)))
        return {
            next(most for most in classes if most >= rows)
            for rows in (len(RAGGED), *(batch for batch, _ in self.cases))
        }

    def configs(self, every: bool = True) -> list[DecodeConfig]:
        """The configurations; or one for each kernel that they compile to."""
        return [
            DecodeConfig(tokens, heads, warps, stages, programs, registers)
            for tokens, heads, warps, stages, registers, choices in self.kernels
            for programs in (choices if every else choices[:1])
        ]

    def case(self, batch: int, context: int, lengths: list[int] | None = None) -> DecodeCase:
        """Random input."""
        made = DecodeCase(self.shape, batch, context, lengths)
        if self.fp8:
            made.key = made.key.to(torch.float8_e4m3fn)
            made.value = made.value.to(torch.float8_e4m3fn)
        return made


LLAMA_TARGET = Target("llama", LLAMA, CASES, KERNELS)
OTHERS = (
    Target("tp2", Shape(16, 4, 128), OTHER_CASES, OTHER_KERNELS),
    Target("tp4", Shape(8, 2, 128), OTHER_CASES, OTHER_KERNELS),
    Target("tp8", Shape(4, 1, 128), OTHER_CASES, OTHER_KERNELS),
    Target("head64", Shape(16, 4, 64), OTHER_CASES, SMALL_HEAD_KERNELS),
    Target("head256", Shape(16, 8, 256), OTHER_CASES, WIDE_HEAD_KERNELS),
    Target("fp8", LLAMA, OTHER_CASES, FP8_KERNELS, fp8=True),
)
TARGETS = {target.name: target for target in (LLAMA_TARGET, *OTHERS)}


def compile_share(targets: list[Target], worker: int, workers: int) -> None:
    """Compile every ``workers``-th kernel by running it once."""
    work = [
        (target, config, rows)
        for target in targets
        for config in target.configs(every=False)
        for rows in target.row_classes
    ]
    for target, config, rows in work[worker::workers]:
        try:
            case = target.case(rows, 64)
            case.spans(case.workspace(config))
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{target.name} {config}: {str(error).strip()[:150]}", flush=True)


def compile_all(options: argparse.Namespace, workers: int) -> None:
    """Run the compiling processes."""
    command = [sys.executable, "-m", "benchmarks.decode_sweep", "--out", str(options.out)]
    command += ["--shapes", *options.shapes]
    started = [
        subprocess.Popen([*command, "--compile", str(worker), str(workers)], cwd=ROOT)
        for worker in range(workers)
    ]
    for process in started:
        process.wait()


def correct(target: Target) -> list[DecodeConfig]:
    """The configurations that compute the right thing on a ragged batch."""
    case = target.case(len(RAGGED), 1024, RAGGED)
    attention = reference.Attention(case.table, True, case.scale)
    want = reference.decode(case.query, case.key, case.value, case.blocks, RAGGED, attention)
    right, broken = [], set()
    for config in target.configs():
        kernel = replace(config, programs=0)
        if kernel in broken:
            continue
        try:
            case.out.fill_(float("nan"))
            workspace = case.workspace(config)
            assert workspace.launch.config == config, "does not fit shared memory"
            case.spans(workspace)
            for row, length in enumerate(RAGGED):
                got = case.out[row]
                if length == 0:
                    assert (got == 0).all(), "a padding row is not zero"
                else:
                    error = reference.relative_error(got, want[row])
                    assert error < 1.5e-2, f"row {row} of {length} tokens is off by {error}"
            right.append(config)
        except Exception as error:
            broken.add(kernel)
            print(f"LEFT OUT {target.name} {config}: {str(error).strip()[:150]}", flush=True)
    return right


def took(case: DecodeCase, config: DecodeConfig, replays: int, rotate: bool = True) -> float:
    """Median microseconds of a configuration."""
    workspace = case.workspace(config)
    return timed(lambda: case.spans(workspace, rotate), replays)


def sweep(target: Target, deadline: float) -> list[dict[str, Any]]:
    """Time all configurations, best first, and FlashAttention 3."""
    configs, rows = correct(target), []
    best_ratio = {config: float("inf") for config in configs}
    for number, (batch, context) in enumerate(target.cases):
        if time.monotonic() > deadline:
            print(f"out of time before {target.name} {batch} x {context}")
            break
        if number == SCREENED:
            configs = [config for config in configs if best_ratio[config] <= NEAR]
            print(f"{len(configs)} configurations go on", flush=True)
        case = target.case(batch, context)
        found = {config: took(case, config, 5) for config in configs}
        least = min(found.values())
        for config in configs:
            best_ratio[config] = min(best_ratio[config], found[config] / least)
        close = sorted(found, key=lambda config: found[config])[:4]
        for config in close:
            found[config] = took(case, config, 20)
        best = min(close, key=lambda config: found[config])
        bare = took(case, best, 10, rotate=False)
        flash = own = None
        if not target.fp8:
            try:
                flash, own = timed(case.flash()), timed(case.flash(ahead=False))
            except Exception as error:
                print(f"FA3 {target.name}: {str(error).strip()[:150]}", flush=True)
        rows.append(
            {
                "target": target.name,
                "batch": batch,
                "context": context,
                "flash": flash,
                "flash_own_heuristic": own,
                "no_rotation": bare,
                "best": asdict(best),
                "us": found[best],
                "all": [
                    {**asdict(config), "us": each}
                    for config, each in sorted(found.items(), key=lambda item: item[1])
                ],
            }
        )
        print(line(rows[-1]), flush=True)
        del case
        torch.cuda.empty_cache()
    return rows


def brief(config: dict[str, Any]) -> str:
    """A configuration in few letters."""
    names = ("tokens", "heads", "warps", "stages", "programs", "registers")
    return " ".join(f"{name[0]}{config[name]}" for name in names)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    flash = row["flash"] or row["us"]
    return (
        f"{row['target']:9}{row['batch']:4} x {row['context']:<6} FA3 {flash:8.1f} "
        f"({row['flash_own_heuristic'] or 0:8.1f}) best {row['us']:8.1f} = {row['us'] / flash:.3f}, "
        f"bare {row['no_rotation']:8.1f}: "
        + "; ".join(f"{each['us'] / flash:.3f} {brief(each)}" for each in row["all"][:3])
    )


def summary(rows: list[dict[str, Any]]) -> None:
    """Ratios of the configurations that are best over all cases: by the geometric mean, and by the worst case."""
    by_config: dict[str, list[float]] = {}
    for row in rows:
        for each in row["all"]:
            flash = row["flash"] or row["us"]
            by_config.setdefault(brief(each), []).append(each["us"] / flash)
    full = {name: ratios for name, ratios in by_config.items() if len(ratios) == len(rows)}
    mean = {name: float(torch.tensor(ratios).log().mean().exp()) for name, ratios in full.items()}
    for name in sorted(mean, key=lambda name: mean[name])[:10]:
        ratios = " ".join(f"{ratio:.2f}" for ratio in full[name])
        print(f"{name:24} mean {mean[name]:.3f} worst {max(full[name]):.3f}: {ratios}")


def main() -> int:
    """Compile, check, time, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=150.0, help="bound of the whole")
    parser.add_argument("--shapes", nargs="+", choices=TARGETS, default=[LLAMA_TARGET.name])
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    start = time.monotonic()
    targets = [TARGETS[name] for name in options.shapes]
    if options.compile:
        compile_share(targets, *options.compile)
        return 0
    compile_all(options, max(1, min(14, (os.cpu_count() or 2) - 2)))
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for target in targets:
        # The first target may use what the others do not need.
        left = options.seconds - 5.0 * (len(targets) - 1 - targets.index(target))
        found = sweep(target, start + left)
        print(f"{target.name}: done after {time.monotonic() - start:.0f} s")
        summary(found)
        rows += found
        options.out.parent.mkdir(parents=True, exist_ok=True)
        meta = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "command": " ".join(sys.argv),
        }
        options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))
    print("\n" + "\n".join(line(row) for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
