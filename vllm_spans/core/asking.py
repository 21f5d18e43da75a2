"""What waiting requests ask the tiers: the blocks that the KV cache does not hold."""

from __future__ import annotations

from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from vllm_spans.core.plan import runs_by_span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from vllm_spans.core.block_tables import SpanBlockTables
    from vllm_spans.core.hashing import Key
    from vllm_spans.core.request_spans import RequestSpans
    from vllm_spans.offload.lookups import Lookups


class Asking:
    """Asks the tiers on behalf of requests.

    Args:
        lookups: Of the tiers.
        tables: What the KV cache holds.
        kv_cache_manager: Knows which requests read the cache.
        block_size: Tokens per block.

    Attributes:
        waiting: Requests with spans that wait for answers; others may overtake them.
    """

    def __init__(
        self,
        lookups: Lookups,
        tables: SpanBlockTables,
        kv_cache_manager: KVCacheManager,
        block_size: int,
    ) -> None:
        self._lookups = lookups
        self._tables = tables
        self._kv_cache_manager = kv_cache_manager
        self._block_size = block_size
        self.waiting: set[str] = set()

    def is_answered(self, request: Request, spans: RequestSpans) -> bool:
        """Ask for what the KV cache does not hold of a request with spans; whether all answers are there."""
        request_id = request.request_id
        if not self._kv_cache_manager.prefix_cache_lookup_enabled(request):
            return True
        # What the KV cache holds may change while the request waits: it is looked at again once all is answered.
        if request_id in self.waiting and not self._lookups.poll(request_id):
            return False
        if self._lookups.resolve(request_id, self._missing(request, spans)):
            self.waiting.discard(request_id)
            return True
        self.waiting.add(request_id)
        return False

    def prefetch(self, queue: Iterable[Request]) -> None:
        """Let the tiers read ahead for the requests that come next.

        Args:
            queue: Waiting requests in their order.
        """
        for request in islice(queue, self._lookups.reads_ahead):
            if not self._kv_cache_manager.prefix_cache_lookup_enabled(request):
                continue
            spans: RequestSpans | None = getattr(request, "vllm_spans", None)
            if spans is not None and spans.keys is None:
                spans = None
            self._lookups.prefetch(
                request.request_id,
                partial(self._missing, request, spans),
                prefix=spans is None,
            )

    def _missing(self, request: Request, spans: RequestSpans | None) -> list[list[Key]]:
        """Keys that the KV cache does not hold; without spans only what is found at the start counts as held."""
        keys: list[Key] = request.block_hashes[: (request.num_tokens - 1) // self._block_size]  # type: ignore[assignment]
        find = self._tables.find
        if spans is None:
            held = sum(1 for _ in takewhile(lambda key: find(key) is not None, keys))
            return [keys[held:]]
        missing = [index for index, key in enumerate(keys) if find(key) is None]
        return [
            [keys[block] for block in run]
            for run in runs_by_span(missing, spans.layout, self._block_size)
        ]
