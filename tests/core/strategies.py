"""Random layouts and prompts for property tests of the pure core."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from vllm_spans.core.hashing import Key, RequestKeys, SpanKeyMemo, make_span_root
from vllm_spans.core.layout import SpanLayout
from vllm_spans.core.policy import GapPolicy, make_policy

BLOCK = 4
ROOT = b"root"


def sha(value: Any) -> Key:
    """A hash function of the engine's kind."""
    return hashlib.sha256(pickle.dumps(value)).digest()


@dataclass
class Prompt:
    """A prompt with spans and its keys."""

    tokens: list[int]
    layout: SpanLayout
    policy: GapPolicy
    salt: str | None = None

    def keys(self, memo: SpanKeyMemo | None = None) -> tuple[list[Key], RequestKeys]:
        tenant = (("cache_salt", self.salt),) if self.salt else None
        request_keys = RequestKeys(
            self.layout,
            self.policy,
            BLOCK,
            sha,
            ROOT,
            make_span_root(sha, tenant, "model"),
            memo or SpanKeyMemo(sha, BLOCK),
        )
        return request_keys.extend(self.tokens, self.extra_keys), request_keys

    def extra_keys(self, start: int, end: int) -> tuple[Any, ...] | None:
        return (("cache_salt", self.salt),) if self.salt and start == 0 else None


@st.composite
def prompts(draw: st.DrawFn, policy: str | None = None) -> Prompt:
    """Prefix (maybe empty), spans from a small pool of documents so that some repeat, cross pieces between, a tail."""
    documents = [
        [100 * (number + 1) + index for index in range(BLOCK * length)]
        for number, length in enumerate([1, 2, 3, 5])
    ]
    tokens = list(range(1, 1 + BLOCK * draw(st.integers(0, 3))))
    plus, cross = [], []
    for _ in range(draw(st.integers(1, 5))):
        plus.append(len(tokens))
        tokens += draw(st.sampled_from(documents))
        if draw(st.booleans()):
            cross.append(len(tokens))
            tokens += [draw(st.integers(900, 999)) for _ in range(BLOCK)]
    tail = draw(st.integers(0, 2 * BLOCK + 1))
    if tail:
        if not cross or cross[-1] < plus[-1]:
            cross.append(len(tokens))
        tokens += [draw(st.integers(800, 899)) for _ in range(tail)]
    name = policy or draw(st.sampled_from(["none", "legolink"]))
    layout = SpanLayout.from_extra_args(
        {"span_starts": plus, "cross_span_starts": cross}, len(tokens), BLOCK
    )
    if layout is None:
        tokens += [7] * (BLOCK + 1)
        layout = SpanLayout.from_extra_args(
            {"span_starts": plus, "cross_span_starts": cross}, len(tokens), BLOCK
        )
    assert layout is not None
    return Prompt(tokens, layout, make_policy(name, BLOCK * draw(st.integers(1, 3))))
