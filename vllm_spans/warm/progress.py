"""What a run has done so far, and how it is told; pure but for the stream that it writes to."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TextIO

from vllm_spans.sizes import format_size

_SHOWN_FAILURES = 20
_PLACES = {"gpu": "the KV cache", "cpu": "CPU memory", "file": "files"}


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
        documents: Documents of the corpus.
        size: Bytes of the corpus.
        done_size: Bytes of the documents that are done.
        cached: Documents that were cached already.
        computed: Documents that were computed, wholly or in part.
        missing: Documents that are not cached, when nothing is computed.
        duplicates: Documents whose equal came earlier.
        failures: Name and reason of each document that failed.
        tokens: Tokens of the spans of all documents but failures and duplicates, pads included.
        pads: Pads among them.
        found_tokens: Those of them that were there already, by place: the KV cache (``gpu``) or a tier behind it.
        computed_tokens: Those that were computed.
        requests: Requests that computed spans.
        kv_bytes_per_token: Bytes of KV per token, as the server tells.
        kv_cache_tokens: Tokens that the server's KV cache holds.
        seconds: Time since the start.
        ended_by: Why the run ended early.
    """

    documents: int
    size: int
    done_size: int = 0
    cached: int = 0
    computed: int = 0
    missing: int = 0
    duplicates: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    pads: int = 0
    found_tokens: Counter[str] = field(default_factory=Counter)
    computed_tokens: int = 0
    requests: int = 0
    kv_bytes_per_token: int | None = None
    kv_cache_tokens: int | None = None
    seconds: float = 0.0
    ended_by: str | None = None

    @property
    def done(self) -> int:
        """Documents that are done."""
        return self.cached + self.computed + self.missing + self.duplicates + len(self.failures)

    @property
    def cached_tokens(self) -> int:
        """Tokens that were there already."""
        return self.found_tokens.total()

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by where they came from."""
        return {**self.found_tokens, "computed": self.computed_tokens}

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of KV of all spans."""
        return None if self.kv_bytes_per_token is None else self.tokens * self.kv_bytes_per_token

    @property
    def overflows(self) -> bool:
        """Whether the spans are more than the server's KV cache holds."""
        return self.kv_cache_tokens is not None and self.tokens > self.kv_cache_tokens

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate of the time left, by bytes of the corpus; ``None`` before anything is done."""
        if not self.done_size:
            return None
        return self.seconds * (self.size - self.done_size) / self.done_size

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON values."""
        each = self.kv_bytes_per_token
        return {
            "object": "spans.warm",
            "documents": {
                "total": self.documents,
                "computed": self.computed,
                "already_cached": self.cached,
                "missing": self.missing,
                "duplicates": self.duplicates,
                "failed": len(self.failures),
            },
            "tokens": {
                "total": self.tokens,
                "pads": self.pads,
                "already_cached": self.cached_tokens,
                "computed": self.computed_tokens,
                "by_source": self.sources,
            },
            "kv_bytes": self.kv_bytes,
            "kv_bytes_by_source": None
            if each is None
            else {k: n * each for k, n in self.sources.items()},
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_cache_tokens": self.kv_cache_tokens,
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "ended_by": self.ended_by,
            "failures": [{"document": name, "reason": reason} for name, reason in self.failures],
        }


def progress_line(tally: Tally) -> str:
    """One line on where the run stands."""
    parts = [f"{tally.done}/{tally.documents} documents"]
    if tally.failures:
        parts.append(f"{len(tally.failures)} failed")
    parts.append(f"tokens: {tally.computed_tokens:,} computed, {tally.cached_tokens:,} cached")
    parts[-1] += _rate(tally)
    left = tally.remaining_seconds
    parts.append("? left" if left is None else f"{format_duration(left)} left")
    return ", ".join(parts)


def _rate(tally: Tally) -> str:
    if not tally.computed_tokens or not tally.seconds:
        return ""
    return f", {tally.computed_tokens / tally.seconds:,.0f} tokens/s"


def summary(tally: Tally) -> str:
    """The end of a run, for people."""
    kinds = {
        "computed": tally.computed,
        "already cached": tally.cached,
        "not cached": tally.missing,
        "duplicates": tally.duplicates,
        "failed": len(tally.failures),
        "not reached": tally.documents - tally.done,
    }
    named = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count > 0)
    lines = [
        f"documents  {tally.documents:,}: {named}",
        f"tokens     {tally.tokens:,} ({tally.pads:,} of them pads): {tally.computed_tokens:,} computed, "
        f"{tally.cached_tokens:,} already cached",
    ]
    if tally.kv_bytes is not None and tally.kv_bytes_per_token is not None:
        lines.append(
            f"KV         {format_size(tally.kv_bytes)}, {tally.kv_bytes_per_token:,} bytes a token"
        )
    if tally.found_tokens.keys() - {"gpu"}:
        lines.append(f"found      {_places(tally)}")
    lines.append(f"time       {tally.seconds:.1f} s, {tally.requests:,} requests{_rate(tally)}")
    if tally.overflows:
        lines.append(
            f"warning: the server's KV cache holds {tally.kv_cache_tokens:,} tokens, fewer than these spans: "
            "only those used last are still there, unless an offload tier keeps the others"
        )
    if tally.ended_by is not None:
        lines.append(f"ended early: {tally.ended_by}")
    return "\n".join(lines)


def _places(tally: Tally) -> str:
    each = tally.kv_bytes_per_token
    parts = []
    for place, tokens in tally.found_tokens.items():
        size = "" if each is None else f" ({format_size(tokens * each)})"
        parts.append(f"{tokens:,} in {_PLACES.get(place, place)}{size}")
    return ", ".join(parts)


class Reporter:
    """Writes progress and failures as they come.

    Args:
        stream: Where to.
        rewrites: Whether the stream is a terminal, whose last line is written anew.
        quiet: Write failures only.
    """

    def __init__(self, stream: TextIO, *, rewrites: bool, quiet: bool = False) -> None:
        self._stream = stream
        self._rewrites = rewrites
        self._quiet = quiet
        self._width = 0
        self._failures = 0

    @property
    def interval(self) -> float:
        """Seconds between two progress lines."""
        return 0.5 if self._rewrites else 10.0

    def progress(self, tally: Tally) -> None:
        """Write a progress line."""
        if self._quiet:
            return
        line = progress_line(tally)
        if self._rewrites:
            # A line that wraps could not be written anew.
            line = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def failure(self, name: str, reason: str) -> None:
        """Name a document that failed; after many, say only that there are more."""
        self._failures += 1
        if self._failures <= _SHOWN_FAILURES:
            self.note(f"{name}: {reason}")
        elif self._failures == _SHOWN_FAILURES + 1:
            self.note("more documents fail; --json lists them all")

    def note(self, line: str) -> None:
        """Write a line that stays."""
        self.close()
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Take the progress line of a terminal away."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


def format_duration(seconds: float) -> str:
    """A duration for people, such as ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
