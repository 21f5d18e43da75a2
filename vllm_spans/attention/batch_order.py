"""The order of a GPU step's rows: decode rows first, then prefill rows as the stock kernel runs them fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_spans.attention.gather_plan import longest_first
from vllm_spans.core.rows import group_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import BatchReqState


def prefill_longest_first(batch: BatchReqState) -> BatchReqState:
    """A step's state with its prefill rows in the order of :func:`longest_first`; decode rows stay in front."""
    tokens = batch.num_scheduled_tokens
    decodes = int((tokens == 1).sum())
    seq_lens = batch.num_computed_prefill_tokens_np + tokens
    groups = [group_of(row) for row in batch.req_ids[decodes:]]
    order = [*range(decodes), *(decodes + row for row in longest_first(groups, seq_lens[decodes:]))]
    arrays = {
        name: value[order]
        for name, value in batch._asdict().items()
        if isinstance(value, np.ndarray)
    }
    return batch._replace(req_ids=[batch.req_ids[row] for row in order], **arrays)
