"""Reads what the exporter needs from an engine's ``/metrics``, and refuses a page that is not whole.

An engine's page has hundreds of lines, most of them vLLM's own; only lines of this plugin are parsed.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

Series = tuple[str, str]
"""A counter without prefix and ``_total``, and the value of its own label, empty when it has none."""

PREFIX = "vllm_spans_"
COUNTERS: dict[str, str | None] = {
    "lookup_tokens": None,
    "reused_tokens": "tier",
    "isolated_tokens": None,
    "gap_tokens": "policy",
    "pad_tokens": None,
    "requests": "outcome",
    "load_failures": "reason",
    "store_failures": "reason",
    "rejected": "reason",
}
"""The engine's counters that the fleet's are made of, and the label of each."""

HOT_SPANS = "hot_span_requests"
MAX_SERIES = 2000
MAX_LABEL = 256
MAX_LINE = 4096

_OURS = re.compile(rf"^{PREFIX}[^\n]*", re.MULTILINE)
_SAMPLE = re.compile(r"([a-zA-Z_]\w*(?:\{.*\})?) +(\S+)(?: +-?\d+)?\r?")
_SERIES = re.compile(r"([a-zA-Z_]\w*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_STARTED = re.compile(r"^process_start_time_seconds ([0-9.e+]+)\r?$", re.MULTILINE)
_MODEL = re.compile(r'^vllm[_:][^\n]*?[{,]model_name="((?:[^"\\\n]|\\.)*)"', re.MULTILINE)
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class PageError(ValueError):
    """What was answered is no whole page of metrics; the text says what is wrong with it."""


@dataclass(frozen=True)
class Page:
    """What one engine's page says.

    Attributes:
        model: Name that the model is served under; ``None`` when the page names none.
        started: When its process started, in seconds since the epoch; ``None`` when several API servers share the
            page, which then does not say.
        counters: Value of each counter in ``COUNTERS``, summed over the labels that are not its own.
        hot_spans: Requests by span, of the spans most asked for.
    """

    model: str | None = None
    started: float | None = None
    counters: dict[Series, float] = field(default_factory=dict)
    hot_spans: dict[str, float] = field(default_factory=dict)

    @property
    def has_spans(self) -> bool:
        """Whether the server has spans switched on."""
        return bool(self.counters)


def parse(body: bytes) -> Page:
    """Read a page.

    Args:
        body: Prometheus's text format, 0.0.4 or OpenMetrics.

    Raises:
        PageError: It is not, or not whole. Nothing of such a page counts: half of its counters would be wrong.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise PageError("not UTF-8") from error
    if not text.endswith("\n"):
        raise PageError("ends in the middle of a line" if text else "empty")
    if not text.startswith("# ") and "\n# TYPE " not in text:
        raise PageError("no metrics in it")
    counters: dict[Series, float] = {}
    hot: dict[str, float] = {}
    lines = _OURS.findall(text)
    if len(lines) > MAX_SERIES:
        raise PageError(f"{len(lines)} series of spans are more than {MAX_SERIES}")
    for line in lines:
        found = _SAMPLE.fullmatch(line) if len(line) <= MAX_LINE else None
        if found is None:
            raise PageError(f"not a sample: {line[:80]!r}")
        series = _read_series(found[1])
        if series is None:
            continue
        value = _number(found[2], line)
        if series[0] == HOT_SPANS:
            hot[series[1]] = hot.get(series[1], 0.0) + value
        else:
            counters[series] = counters.get(series, 0.0) + value
    started, model = _STARTED.search(text), _MODEL.search(text)
    return Page(
        model=_unescape(model[1])[:MAX_LABEL] if model else None,
        started=_number(started[1], started[0]) if started else None,
        counters=counters,
        hot_spans=hot,
    )


@functools.lru_cache(maxsize=16384)  # engines have the same series: each is parsed once
def _read_series(text: str) -> Series | None:
    """Counter or hot span that a series stands for; ``None`` for a series that is not needed."""
    found = _SERIES.fullmatch(text)
    if found is None:
        raise PageError(f"not a series: {text[:80]!r}")
    name = found[1].removeprefix(PREFIX)
    counter = name.removesuffix("_total")
    if name == HOT_SPANS:
        label: str | None = "span"
    elif name != counter and counter in COUNTERS:
        label = COUNTERS[counter]
    else:
        return None
    value = ""
    if label is not None:
        labels = _labels(found[2] or "")
        if label not in labels:
            raise PageError(f"no label {label}: {text[:80]!r}")
        value = labels[label]
        if len(value) > MAX_LABEL:
            raise PageError(f"a label of {len(value)} characters: {text[:80]!r}")
    return (name if name == HOT_SPANS else counter, value)


def _labels(text: str) -> dict[str, str]:
    labels, position = {}, 0
    while position < len(text):
        found = _LABEL.match(text, position)
        if found is None:
            raise PageError(f"not labels: {text[:80]!r}")
        labels[found[1]] = _unescape(found[2])
        position = found.end()
    return labels


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text)


def _number(text: str, line: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise PageError(f"not a count: {line[:80]!r}")
    return value
