"""KV connectors beside spans: the one that knows gaps, and vLLM's own, which know prefixes only.

A connector without gaps keeps its contiguous meaning for requests without spans. A request with spans it sees as not
matched: it would be given a prefix that ends at the first hole, in blocks of its own, while the plan has composed its
whole table already.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_spans.core.block_tables import SpanBlockTables
    from vllm_spans.offload.connector import SpansOffloadingConnector


def connector_with_gaps(connector: KVConnectorBase_V1 | None) -> SpansOffloadingConnector | None:
    """The connector that knows gaps: the given one, or one of a ``MultiConnector``; ``None`` where there is none."""
    return next((part for part in _parts(connector) if _knows_gaps(part)), None)  # type: ignore[return-value]


class PrefixConnectors:
    """Those connectors of an engine that know prefixes only.

    Args:
        connector: Of the scheduler.
        tables: Its blocks.
        preempted: Which requests have been preempted since the last step was described to the worker.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1 | None,
        tables: SpanBlockTables,
        preempted: Callable[[], Container[str]],
    ) -> None:
        # vLLM's offloading connector is the only one that the gate admits.
        self._connectors: Sequence[Any] = [c for c in _parts(connector) if not _knows_gaps(c)]
        self._taken: set[int] = set()
        for part in self._connectors:
            _match_no_spans(part, preempted)
        if self._connectors:
            tables.watch_taken(self._note_taken)

    def announce_taken(self) -> None:
        """Tell the connectors of blocks that have new owners, before they describe the step to the worker.

        They store a block of a finished request late, and are quick about it only if they know that the block is
        about to be written. What they see of a step are blocks of the requests that it runs: not those of rows, nor of
        loads by another connector.
        """
        for part in self._connectors:
            part.scheduler._current_batch_allocated_block_ids |= self._taken
        self._taken.clear()

    def forget_table(self, request: Request) -> None:
        """Tell the connectors that a request has lost its blocks.

        They learn that from the step that runs it again. One that ends before that, planned anew, looks as if the old
        blocks held what the new plan says.
        """
        for part in self._connectors:
            state = part.scheduler._req_status.get(request.request_id)
            for group in state.group_states if state is not None else ():
                group.block_ids.clear()

    def _note_taken(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._taken.update(block.block_id for block in blocks)


def _parts(connector: KVConnectorBase_V1 | None) -> Sequence[KVConnectorBase_V1]:
    if connector is None:
        return ()
    parts: Sequence[KVConnectorBase_V1] = getattr(connector, "sub_connectors", (connector,))
    return parts


def _knows_gaps(connector: KVConnectorBase_V1) -> bool:
    return hasattr(connector, "get_computed_token_gaps")


def _match_no_spans(connector: Any, preempted: Callable[[], Container[str]]) -> None:
    stock = connector.get_num_new_matched_tokens

    @functools.wraps(stock)
    def get_num_new_matched_tokens(
        request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        spans = getattr(request, "vllm_spans", None)
        if spans is not None and spans.keys is not None:
            return 0, False
        if request.request_id in preempted():
            # vLLM's connector takes all jobs of such a request for stores. It may ask in the next step.
            return None, False
        return stock(request, num_computed_tokens)  # type: ignore[no-any-return]

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
