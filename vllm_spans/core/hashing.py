"""The two hash chains of a request with spans.

Exact chain E: the stock chain from the prompt's start, so prefix blocks are shared with ordinary requests. Its root is
not the stock one: what is cached is K before its rotation, which a stock engine must never find under its keys. In a
span it folds in, instead of the tokens, which blocks are recomputed in context and the key of the span as a whole:
that is all of the layout and the policy that the KV of what follows depends on.

Span chain S: starts anew at every plus span from a root made of the tenant's salt, the LoRA adapter and the model, so
that it depends on nothing before the span.

A block's key is S inside a plus span past its gap, E everywhere else. No S key can equal an E key: each folds
in a word of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from vllm_spans.core.layout import SpanLayout
from vllm_spans.core.policy import GapPolicy

Key = bytes
HashFn = Callable[[Any], bytes]
"""Hash of any tuple of bytes, ints, strings and tuples (upstream: ``get_hash_fn_by_name``)."""
ExtraKeysFn = Callable[[int, int], "tuple[Any, ...] | None"]
"""Extra keys of the block that covers tokens ``[start, end)`` (upstream: ``generate_block_hash_extra_keys``)."""

SPAN_DOMAIN = "vllm_spans.span.1"
EXACT_DOMAIN = "vllm_spans.exact.1"
UNROTATED_DOMAIN = "vllm_spans.unrotated.1"


def make_exact_root(hash_fn: HashFn, stock_root: Key) -> Key:
    """Parent of the first block of every prompt in an engine with spans.

    Args:
        hash_fn: Hash function of the engine.
        stock_root: Parent of first blocks in an engine without.
    """
    return hash_fn((UNROTATED_DOMAIN, stock_root))


def make_span_root(hash_fn: HashFn, tenant: tuple[Any, ...] | None, model: str) -> Key:
    """Parent of the first block of every span of one tenant, adapter and model.

    Args:
        hash_fn: Hash function of the engine.
        tenant: Extra keys of a block at position 0: ``cache_salt`` and the LoRA adapter among them.
        model: Fingerprint of the model and its RoPE geometry.
    """
    return hash_fn((SPAN_DOMAIN, "root", tenant, model))


class SpanKeyMemo:
    """Keys of spans seen before, by content: a document that comes again is not hashed again.

    Args:
        capacity: Most tokens kept; the least recently used span goes first.
    """

    def __init__(self, hash_fn: HashFn, block_size: int, capacity: int = 4_000_000) -> None:
        self._hash_fn = hash_fn
        self._block_size = block_size
        self._capacity = capacity
        self._size = 0
        self._keys: OrderedDict[tuple[Key, tuple[int, ...]], tuple[Key, ...]] = OrderedDict()

    def keys(self, root: Key, tokens: Sequence[int]) -> tuple[Key, ...]:
        """S keys of a span.

        Args:
            root: Result of ``make_span_root``.
            tokens: The span's tokens, a whole number of blocks.

        Returns:
            One key per block.
        """
        content = (root, tuple(tokens))
        known = self._keys.get(content)
        if known is not None:
            self._keys.move_to_end(content)
            return known
        parent, keys = root, []
        for start in range(0, len(tokens), self._block_size):
            parent = self._hash_fn(
                (parent, content[1][start : start + self._block_size], SPAN_DOMAIN)
            )
            keys.append(parent)
        self._keys[content] = result = tuple(keys)
        self._size += len(tokens)
        while self._size > self._capacity and len(self._keys) > 1:
            (_, dropped), _ = self._keys.popitem(last=False)
            self._size -= len(dropped)
        return result


class RequestKeys:
    """Keys of one request's blocks, extended as tokens arrive.

    Attributes:
        span_keys: Per plus span the S keys of all its blocks, those under its gap included: isolated
            computation needs them. Complete once the prompt has been hashed.
        is_span_key: Per block of the prompt whether its key is an S key.
    """

    def __init__(
        self,
        layout: SpanLayout,
        policy: GapPolicy,
        block_size: int,
        hash_fn: HashFn,
        exact_root: Key,
        span_root: Key,
        memo: SpanKeyMemo,
    ) -> None:
        self._layout = layout
        self._policy = policy
        self._block_size = block_size
        self._hash_fn = hash_fn
        self._span_root = span_root
        self._memo = memo
        self._exact = exact_root
        self._num_blocks = 0
        self._next_span = 0
        self.span_keys: list[tuple[Key, ...]] = []
        self.is_span_key: list[bool] = []

    def extend(self, tokens: Sequence[int], extra_keys: ExtraKeysFn) -> list[Key]:
        """Keys of the full blocks that have none yet.

        Args:
            tokens: All tokens of the request so far.
            extra_keys: Extra keys of a block of the exact chain.

        Returns:
            The new keys in order of position.
        """
        new: list[Key] = []
        size, total = self._block_size, len(tokens) // self._block_size
        while self._num_blocks < total:
            start = self._num_blocks * size
            spans = self._layout.spans
            if self._next_span < len(spans) and spans[self._next_span].start == start:
                new.extend(self._enter_span(tokens))
                continue
            extra = extra_keys(start, start + size)
            self._exact = self._hash_fn((self._exact, tuple(tokens[start : start + size]), extra))
            new.append(self._exact)
            self.is_span_key.append(False)
            self._num_blocks += 1
        return new

    def _enter_span(self, tokens: Sequence[int]) -> list[Key]:
        """Key all blocks of the span that starts at the next block.

        E takes in the S key of a block in place of its tokens: the two determine each other, and the S key is
        memoised.
        """
        span = self._layout.spans[self._next_span]
        span_keys = self._memo.keys(self._span_root, tokens[span.start : span.end])
        gap_blocks = {
            block
            for start, end in self._policy.gaps(span)
            for block in range(start // self._block_size, end // self._block_size)
        }
        keys: list[Key] = []
        first = span.start // self._block_size
        for offset, span_key in enumerate(span_keys):
            in_gap = first + offset in gap_blocks
            if in_gap:
                self._exact = self._hash_fn((self._exact, (EXACT_DOMAIN, "gap", span_key)))
            keys.append(self._exact if in_gap else span_key)
            self.is_span_key.append(not in_gap)
        self._exact = self._hash_fn((self._exact, (EXACT_DOMAIN, "end", span_keys[-1])))
        self.span_keys.append(span_keys)
        self._next_span += 1
        self._num_blocks += len(span_keys)
        return keys
