"""Prevents a step whose states belong to other rows than its ids, or whose decode rows are taken for prefill.

The order needs no GPU; that answers do not depend on it is checked on one by ``benchmarks.gpu_engine``.
"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.model_runner import BatchReqState, sort_batch_req_ids

from vllm_spans.attention.batch_order import prefill_longest_first
from vllm_spans.core.rows import ROW_PREFIX, group_of


def batch_of(rows: dict[str, tuple[int, int]]) -> BatchReqState:
    """The state of a step in stock's order, every array made of the rows' own numbers."""
    ids = sort_batch_req_ids({row: tokens for row, (_, tokens) in rows.items()}, {}, 1)
    starts = np.array([rows[row][0] for row in ids])
    tokens = np.array([rows[row][1] for row in ids], dtype=np.int32)
    return BatchReqState(
        req_ids=ids,
        num_scheduled_tokens=tokens,
        num_tokens=int(tokens.sum()),
        num_draft_tokens_np=None,
        idx_mapping_np=starts * 7 + tokens,
        prefill_len_np=starts + tokens + 1,
        num_computed_prefill_tokens_np=starts,
        is_prefilling_np=tokens > 1,
        max_seq_len_np=None,
        has_prefill=True,
        prefill_runs_as_decode_np=tokens == 1,
        decode_graph_eligible=False,
    )


numbers = st.tuples(st.integers(0, 900), st.integers(1, 64))


@given(
    st.dictionaries(st.sampled_from("abcdef"), numbers, min_size=1),
    st.lists(st.tuples(st.sampled_from("abc"), numbers), max_size=9),
)
def test_all_that_belongs_to_a_row_moves_with_it(
    requests: dict[str, tuple[int, int]], gaps: list[tuple[str, tuple[int, int]]]
) -> None:
    rows = dict(requests)
    for number, (owner, each) in enumerate(gaps):
        rows[f"{ROW_PREFIX}{number}{group_of(owner)}"] = each
    before = batch_of(rows)
    after = prefill_longest_first(before)
    for index, row in enumerate(after.req_ids):
        start, tokens = rows[row]
        assert after.num_computed_prefill_tokens_np[index] == start
        assert after.num_scheduled_tokens[index] == tokens
        assert after.idx_mapping_np[index] == start * 7 + tokens
        assert after.prefill_len_np[index] == start + tokens + 1
        assert after.prefill_runs_as_decode_np is not None
        assert after.prefill_runs_as_decode_np[index] == (tokens == 1)
    assert set(after.req_ids) == set(rows)
    decodes = sum(tokens == 1 for _, tokens in rows.values())
    assert after.req_ids[:decodes] == before.req_ids[:decodes]
    assert before.num_tokens == after.num_tokens
    groups = [group_of(row) for row in after.req_ids[decodes:]]
    changes = sum(a != b for a, b in itertools.pairwise(groups))
    assert not groups or changes == len(set(groups)) - 1
