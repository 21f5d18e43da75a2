"""From records to numbers: quantiles, goodput, stages and the knee; pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.arrivals import Stage
from loadtests.outcome import Outcome
from loadtests.records import Record

QUANTILES = (0.5, 0.9, 0.95, 0.99)
_GENERATOR = (Outcome.CANCELLED, Outcome.LOST, Outcome.NOT_SENT)


@dataclass(frozen=True, slots=True)
class Slo:
    """What users are promised; a bound that is ``None`` is no bound.

    Attributes:
        ttft: Most seconds to the first visible token.
        tpot: Most seconds per output token after the first.
        e2e: Most seconds to the end.
        share: Least share of all requests that keep every bound. A failed request keeps none.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    share: float = 0.99

    def is_met_by(self, record: Record) -> bool:
        """Whether a request kept every bound."""
        if record.outcome is not Outcome.OK:
            return False
        return not any(
            bound is not None and value is not None and value > bound
            for bound, value in (
                (self.ttft, record.ttft),
                (self.tpot, record.tpot),
                (self.e2e, record.e2e),
            )
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """How late the generator may be, in seconds, before its numbers are worth nothing.

    Attributes:
        delay: Schedule delay that 99 % of the requests must not exceed.
        lag: Lateness of a worker's timer that 99 % of its seconds must not exceed.
        cpu: Share of a core that a worker may use over the run.
    """

    delay: float = 0.05
    lag: float = 0.05
    cpu: float = 0.85


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that ``share`` of the values do not exceed; ``None`` of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """Count, mean and quantiles of the values that are there."""
    found = [value for value in values if value is not None]
    result: dict[str, float | int | None] = {
        "count": len(found),
        "mean": sum(found) / len(found) if found else None,
        "max": max(found, default=None),
    }
    return result | {f"p{share * 100:g}": quantile(found, share) for share in QUANTILES}


def summarise(
    records: Sequence[Record], stages: Sequence[Stage], duration: float, slo: Slo
) -> dict[str, Any]:
    """All numbers of a run.

    Args:
        records: Its requests, those never sent included.
        stages: Of its arrivals; none in a closed loop.
        duration: Seconds it took.
        slo: The objective.
    """
    good = [record for record in records if record.outcome is Outcome.OK]
    kept = sum(slo.is_met_by(record) for record in records)
    span = max(duration, 1e-9)
    output = sum(record.completion_tokens or 0 for record in good)
    outcomes = Counter(record.outcome.value for record in records)
    return {
        "requests": len(records),
        "outcomes": dict(sorted(outcomes.items())),
        "failed": len(records) - len(good),
        "duration": duration,
        "requests_per_second": len(good) / span,
        "output_tokens": output,
        "output_tokens_per_second": output / span,
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in good),
        "goodput": {
            "kept": kept,
            "share": kept / len(records) if records else None,
            "per_second": kept / span,
            "met": bool(records) and kept >= slo.share * len(records),
        },
        "ttft": spread(record.ttft for record in good),
        "itl": spread(gap for record in good for gap in record.gaps),
        "tpot": spread(record.tpot for record in good),
        "e2e": spread(record.e2e for record in good),
        "schedule_delay": spread(record.delay for record in records),
        "stages": [_stage(index, stage, records, slo) for index, stage in enumerate(stages)],
        "knee": knee(records, stages, slo),
    }


def _stage(index: int, stage: Stage, records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    mine = [record for record in records if record.stage == index]
    kept = sum(slo.is_met_by(record) for record in mine)
    return {
        "begin": stage.begin,
        "end": stage.end,
        "rate": stage.rate,
        "requests": len(mine),
        "share": kept / len(mine) if mine else None,
        "ttft": spread(r.ttft for r in mine if r.outcome is Outcome.OK),
    }


def knee(records: Sequence[Record], stages: Sequence[Stage], slo: Slo) -> float | None:
    """The greatest rate up to which every stage keeps the objective; ``None`` if there are no two stages, 0 if even
    the lowest rate does not keep it."""
    if len(stages) < 2:
        return None
    best = 0.0
    for index, stage in sorted(enumerate(stages), key=lambda pair: pair[1].rate):
        mine = [record for record in records if record.stage == index]
        if mine and sum(slo.is_met_by(record) for record in mine) < slo.share * len(mine):
            break
        if mine:
            best = stage.rate
    return best


def generator_faults(
    records: Sequence[Record],
    health: Sequence[dict[str, Any]],
    dead_workers: Sequence[int],
    bounds: Bounds,
) -> list[str]:
    """Why the numbers are the generator's rather than the server's; none if they are the server's."""
    faults = [f"worker {worker} died" for worker in dead_workers]
    delay = quantile([r.delay for r in records if r.delay is not None], 0.99)
    if delay is not None and delay > bounds.delay:
        faults.append(
            f"1 % of the requests were sent {delay * 1000:.0f} ms late or later (bound {bounds.delay * 1000:.0f} ms); "
            "use more --workers, a lower rate or a faster machine"
        )
    for worker in sorted({line["worker"] for line in health}):
        mine = [line for line in health if line["worker"] == worker]
        lag = quantile([line["lag"] for line in mine], 0.99)
        cpu = sum(line["cpu"] for line in mine) / len(mine)
        if lag is not None and lag > bounds.lag:
            faults.append(
                f"worker {worker}: its timer rang {lag * 1000:.0f} ms late (bound {bounds.lag * 1000:.0f} ms); it is "
                "short of CPU: use more --workers or a machine of its own"
            )
        if cpu > bounds.cpu:
            faults.append(
                f"worker {worker} used {cpu:.0%} of a core (bound {bounds.cpu:.0%}); use more --workers"
            )
    return faults
