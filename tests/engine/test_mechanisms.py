"""Prevents: a test of an invariant that passes although the mechanism behind it is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine import test_blocks as blocks
from tests.engine import test_inv1_cache_states as states
from tests.engine import test_inv1_oracle as oracle_tests
from tests.engine import test_inv2_shared_blocks as shared
from tests.engine import test_inv3_holes as holes
from tests.engine import test_inv4_exact_requests as exact
from tests.engine import test_inv5_tenants as tenants
from tests.engine import test_inv6_full_policy as full
from tests.engine.harness import Engine

FAULTS = "tests.engine.faults"


@contextmanager
def fault(engine: Engine, name: str) -> Iterator[None]:
    """Switch a mechanism off for a while; the body has to fail on an assertion."""
    engine.call(f"{FAULTS}:apply", name=name)
    try:
        with pytest.raises(AssertionError):
            yield
    finally:
        engine.call(f"{FAULTS}:restore")


LEGOLINK = {"policy": "legolink", "gap_length": 32}


@pytest.mark.parametrize(
    "name",
    [
        "no gap rows",
        "no isolated rows",
        "cold spans in context",
        "no rotation",
        "rotation off by a block",
    ],
)
def test_the_oracle_sees(spans_engine: Engine, oracle_for: Callable[[str], Any], name: str) -> None:
    with fault(spans_engine, name):
        oracle_tests.check(spans_engine, oracle_for("llama"), 200, LEGOLINK)


@pytest.mark.parametrize("state", ["warm_from_another_order", "partly_warm", "same_step"])
def test_the_states_see_contextual_kv_under_a_span_key(spans_engine: Engine, state: str) -> None:
    with fault(spans_engine, "cold spans in context"):
        states.test_same_answer_in_every_state(spans_engine, state)


def test_the_states_see_a_resume_without_a_plan(spans_engine: Engine) -> None:
    with fault(spans_engine, "no plan on resume"):
        states.test_same_answer_in_every_state(spans_engine, "preempted_and_evicted")


def test_the_states_see_a_hole_that_is_not_filled(spans_engine: Engine) -> None:
    with fault(spans_engine, "no isolated rows"):
        states.test_same_answer_in_every_state(spans_engine, "evicted_in_the_middle")


def test_one_content_sees_contextual_kv_under_a_span_key(spans_engine: Engine) -> None:
    with fault(spans_engine, "cold spans in context"):
        states.test_one_key_means_one_content(spans_engine)


@pytest.mark.parametrize(
    "test",
    [
        shared.test_cached_blocks_never_change,
        shared.test_one_span_at_two_positions_at_once,
        shared.test_span_read_at_offset_zero_after_gaps,
    ],
    ids=lambda test: test.__name__,
)
def test_shared_blocks_see_a_gap_in_them(
    spans_engine: Engine, test: Callable[[Engine], None]
) -> None:
    with fault(spans_engine, "gaps in shared blocks"):
        test(spans_engine)


def test_holes_see_a_contiguous_lookup(spans_engine: Engine) -> None:
    with fault(spans_engine, "lookup ends at a hole"):
        holes.test_a_cold_span_costs_only_itself(spans_engine, {1})


@pytest.mark.parametrize(
    "test",
    [exact.test_policies_do_not_share_contextual_blocks, exact.test_same_tokens_other_layout],
    ids=lambda test: test.__name__,
)
def test_exact_chain_sees_a_missing_layout(
    spans_engine: Engine, test: Callable[[Engine], None]
) -> None:
    with fault(spans_engine, "layout not in exact chain"):
        test(spans_engine)


def test_span_free_requests_see_approximate_kv(spans_engine: Engine, stock_engine: Engine) -> None:
    with fault(spans_engine, "layout not in exact chain"):
        exact.test_span_free_after_spans_equals_stock(spans_engine, stock_engine)


def test_tenants_see_a_missing_salt(spans_engine: Engine) -> None:
    with fault(spans_engine, "no salt in span roots"):
        tenants.test_salts_do_not_share_spans(spans_engine, 1)


def test_tenants_of_one_step_see_a_missing_salt(spans_engine: Engine) -> None:
    with fault(spans_engine, "no salt in span roots"):
        tenants.test_salts_in_one_step(spans_engine)


def test_full_sees_another_policy(spans_engine: Engine, stock_engine: Engine) -> None:
    with fault(spans_engine, "full is not full"):
        full.test_full_equals_stock(spans_engine, stock_engine)


def test_accounting_sees_a_leak(tiny_cache_engine: Engine) -> None:
    """Last in this file: the engine has lost blocks for good, and the pool starts another one."""
    with fault(tiny_cache_engine, "blocks are not released"):
        blocks.test_abort_in_the_middle_of_the_gaps(tiny_cache_engine, 3, "cold")
