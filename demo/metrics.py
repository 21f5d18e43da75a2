"""Read the span counters of a server's /metrics around one request."""

import dataclasses
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_COUNTERS = {
    "reused": "vllm_spans_reused_tokens_total",
    "isolated": "vllm_spans_isolated_tokens_total",
    "gap": "vllm_spans_gap_tokens_total",
    "pad": "vllm_spans_pad_tokens_total",
}
_REQUESTS = "vllm_spans_requests_total"


@dataclasses.dataclass(frozen=True)
class SpanTokens:
    """Token counts of one request, or of a server since its start.

    Attributes:
        reused: Span tokens whose KV came from the cache.
        isolated: Span tokens computed on their own.
        gap: Span tokens computed again in the request's context.
        pad: Tokens that fill pieces up to whole blocks.
        requests: Requests that the engine has counted.
    """

    reused: int = 0
    isolated: int = 0
    gap: int = 0
    pad: int = 0
    requests: int = 0

    def __sub__(self, other: "SpanTokens") -> "SpanTokens":
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return SpanTokens(*(a - b for a, b in zip(mine, theirs, strict=True)))


def parse(text: str) -> SpanTokens:
    """Sum the span counters over all their labels.

    Args:
        text: A page in Prometheus' text format.

    Returns:
        The counts; a counter that is not on the page counts as 0.
    """
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    counts = {field: int(sums.get(name, 0)) for field, name in _COUNTERS.items()}
    return SpanTokens(requests=int(sums.get(_REQUESTS, 0)), **counts)


def read(url: str) -> SpanTokens:
    """Read the counters of a server.

    Args:
        url: The server's address without a path.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parse(answer.read().decode())


def since(url: str, before: SpanTokens, patience: float = 5.0) -> SpanTokens:
    """Counts since an earlier reading, once the engine's report of a request has arrived.

    The engine reports its counters beside the tokens, so they can come just after the answer.

    Args:
        url: The server's address without a path.
        before: The earlier reading.
        patience: Seconds to wait for the report.
    """
    deadline = time.monotonic() + patience
    while True:
        now = read(url)
        if now.requests > before.requests or time.monotonic() > deadline:
            return now - before
        time.sleep(0.05)
