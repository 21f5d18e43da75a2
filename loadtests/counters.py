"""The server's own counters, and what they and the client must agree on."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadtests.outcome import Outcome
from loadtests.records import Record

Counters = Mapping[str, float]

_PREFIXES = ("vllm:", "vllm_spans_")
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def parse(text: str) -> dict[str, float]:
    """vLLM's counters and gauges of a page in Prometheus' text format, each summed over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "gauge") or not family.name.startswith(_PREFIXES):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def read(base: str, timeout: float = 30.0) -> dict[str, float]:
    """Read a server's ``/metrics``.

    Args:
        base: The server's address without a path.
        timeout: Seconds to wait.

    Returns:
        The counters; none from a server without ``/metrics``.
    """
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=timeout) as answer:
            return parse(answer.read().decode())
    except (OSError, http.client.HTTPException, ValueError):
        return {}


def read_idle(base: str, patience: float = 60.0) -> dict[str, float]:
    """Read the counters once nothing runs or waits; they are counted a moment after the answers."""
    deadline = time.monotonic() + patience
    before: dict[str, float] = {}
    while True:
        now = read(base)
        busy = sum(now.get(name, 0.0) for name in _BUSY)
        if (not busy and now == before) or time.monotonic() > deadline:
            return now
        before = now
        time.sleep(0.5)


class Sampler:
    """Reads a server's counters at intervals in a thread of its own, from ``start`` to ``stop``.

    Args:
        base: The server's address.
        interval: Seconds between two readings.
        write: Takes each sample: ``at`` in seconds from ``begin``, and ``counters``.
        begin: Start of the run on the monotonic clock.
    """

    def __init__(
        self, base: str, interval: float, write: Callable[[dict[str, Any]], None], begin: float
    ) -> None:
        self._base = base
        self._interval = interval
        self._write = write
        self._begin = begin
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the reading that is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            counters = read(self._base)
            if counters:
                at = round(time.monotonic() - self._begin, 3)
                self._write({"type": "counters", "at": at, "counters": counters})


@dataclass(frozen=True, slots=True)
class Check:
    """One number that client and server both know.

    Attributes:
        what: Its name.
        client: As the client counted it.
        server: As the server did; ``None`` if it does not say.
    """

    what: str
    client: float
    server: float | None

    @property
    def agrees(self) -> bool:
        """Whether they are equal. A number that the server does not say is no agreement."""
        return self.server is not None and self.client == self.server


def reconcile(records: Sequence[Record], before: Counters, after: Counters) -> list[Check]:
    """Compare what the client got with what the server counted meanwhile.

    They can differ only if something else used the server, if requests were broken off, or if one of both counts
    wrongly.
    """
    good = [record for record in records if record.outcome is Outcome.OK]

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    checks = [
        Check("requests", len(good), grown("vllm:request_success_total")),
        Check(
            "prompt tokens", _sum(r.prompt_tokens for r in good), grown("vllm:prompt_tokens_total")
        ),
        Check(
            "output tokens",
            _sum(r.completion_tokens for r in good),
            grown("vllm:generation_tokens_total"),
        ),
    ]
    if "vllm_spans_pad_tokens_total" in after:
        pads = grown("vllm_spans_pad_tokens_total")
        checks.append(Check("pad tokens", _sum(r.pad_tokens for r in good), pads))
    return checks


def _sum(values: Any) -> int:
    return sum(value or 0 for value in values)


def reuse(before: Counters, after: Counters) -> dict[str, float | None]:
    """Shares of span tokens and of prompt tokens that were reused, and gap tokens recomputed per span token reused."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def share(part: float, whole: float) -> float | None:
        return part / whole if whole else None

    reused = grown("vllm_spans_reused_tokens_total")
    return {
        "span_reuse": share(reused, grown("vllm_spans_lookup_tokens_total")),
        "gap_ratio": share(grown("vllm_spans_gap_tokens_total"), reused),
        "prefix_hits": share(
            grown("vllm:prefix_cache_hits_total"), grown("vllm:prefix_cache_queries_total")
        ),
    }
