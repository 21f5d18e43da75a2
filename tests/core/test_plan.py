"""Prevents a plan that computes too little, too much, or in an order in which something is read before it is there."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import BLOCK, Prompt, prompts
from vllm_spans.core.plan import ReusePlan, SegmentKind, make_plan, runs_by_span


def plan_of(
    prompt: Prompt, cached: set[bytes], stored: set[bytes] | frozenset[bytes] = frozenset()
) -> ReusePlan:
    """Plan with what the KV cache holds, and what other tiers hold."""
    keys, request_keys = prompt.keys()
    return make_plan(
        prompt.layout,
        prompt.policy,
        BLOCK,
        len(prompt.tokens),
        [*(key in cached for key in keys), False],
        request_keys.span_keys,
        cached.__contains__,
        [*(key in stored for key in keys), False],
    )


def all_keys(prompt: Prompt) -> list[bytes]:
    keys, request_keys = prompt.keys()
    return sorted({*keys, *(key for span in request_keys.span_keys for key in span)})


@st.composite
def planned(draw: st.DrawFn) -> tuple[Prompt, set[bytes], ReusePlan]:
    prompt = draw(prompts())
    pool = all_keys(prompt)
    cached = set(draw(st.lists(st.sampled_from(pool), unique=True)))
    if draw(st.booleans()):
        cached = set(pool) - cached
    stored = set(draw(st.lists(st.sampled_from(pool), unique=True)))
    return prompt, cached, plan_of(prompt, cached, stored)


def blocks(start: int, end: int) -> range:
    return range(start // BLOCK, -(-end // BLOCK))


@settings(max_examples=300)
@given(planned())
def test_executing_the_plan_writes_each_missing_block_once_and_reads_only_what_is_there(
    case: tuple[Prompt, set[bytes], ReusePlan],
) -> None:
    prompt, cached, plan = case
    _keys, request_keys = prompt.keys()
    there = {index for index, hit in enumerate(plan.hits) if hit}
    assert not there & set(plan.loads)
    there |= set(plan.loads)
    heads_there = {
        (span, offset)
        for span, span_keys in enumerate(request_keys.span_keys)
        for offset, key in enumerate(span_keys)
        if key in cached
    }
    is_span = request_keys.is_span_key

    def is_body(block: int) -> bool:
        return block < len(is_span) and is_span[block]

    def resolved(block: int) -> bool:
        return plan.aliases.get(block, block) in there

    for segment in plan.segments:
        if segment.kind is SegmentKind.ISOLATED:
            assert segment.span is not None
            first = prompt.layout.spans[segment.span].start // BLOCK
            for block in blocks(segment.start, segment.end):
                for earlier in range(first, block):
                    if is_body(earlier):
                        assert resolved(earlier)
                    else:
                        assert (segment.span, earlier - first) in heads_there
                if is_body(block):
                    assert not resolved(block)
                    there.add(block)
                else:
                    assert (segment.span, block - first) not in heads_there
                    heads_there.add((segment.span, block - first))
        else:
            for block in blocks(segment.start, segment.end):
                assert not is_body(block)
                assert all(resolved(earlier) for earlier in range(block)), "context is incomplete"
                assert block not in there
                there.add(block)
    for block in blocks(plan.resume_at, len(prompt.tokens)):
        assert not is_body(block) and block not in there
        assert all(resolved(earlier) for earlier in range(block))
        there.add(block)
    assert all(resolved(block) for block in range(len(plan.hits)))


@given(planned())
def test_counts_add_up(case: tuple[Prompt, set[bytes], ReusePlan]) -> None:
    prompt, _, plan = case
    assert set(plan.loaded_spans) <= set(plan.loads)
    assert len(plan.loaded_spans) * BLOCK <= plan.reused_tokens
    assert 0 <= plan.isolated_tokens <= plan.lookup_tokens
    assert plan.lookup_tokens == plan.reused_tokens + plan.isolated_tokens
    isolated = sum(
        len(segment) for segment in plan.segments if segment.kind is SegmentKind.ISOLATED
    )
    assert isolated == plan.isolated_tokens + plan.isolated_head_tokens
    contextual = sum(
        len(segment) for segment in plan.segments if segment.kind is not SegmentKind.ISOLATED
    )
    table = -(-len(prompt.tokens) // BLOCK) * BLOCK
    own = table - plan.resume_at
    assert plan.cached_tokens + plan.isolated_tokens + contextual + own == table
    assert plan.cached_tokens < len(prompt.tokens)


@given(prompts())
def test_the_last_token_is_computed_even_if_all_is_cached(prompt: Prompt) -> None:
    plan = plan_of(prompt, set(all_keys(prompt)))
    assert not plan.segments
    assert plan.resume_at == (len(prompt.tokens) - 1) // BLOCK * BLOCK
    assert plan.reused_tokens == plan.lookup_tokens


@given(prompts(), st.data())
def test_a_missing_span_costs_only_itself(prompt: Prompt, data: st.DataObject) -> None:
    _, request_keys = prompt.keys()
    span = data.draw(st.integers(0, len(prompt.layout.spans) - 1))
    lost = set(request_keys.span_keys[span])
    plan = plan_of(prompt, set(all_keys(prompt)) - lost)
    touched = {
        index
        for index, other in enumerate(prompt.layout.spans)
        if any(s.span == index for s in plan.segments if s.kind is SegmentKind.ISOLATED)
    }
    assert all(set(request_keys.span_keys[index]) & lost for index in touched)
    assert plan.gap_tokens == 0


@given(prompts(policy="legolink"))
def test_an_empty_cache_computes_every_gap(prompt: Prompt) -> None:
    plan = plan_of(prompt, set())
    expected = sum(
        end - start for span in prompt.layout.spans for start, end in prompt.policy.gaps(span)
    )
    assert plan.gap_tokens == expected
    assert plan.cached_tokens == len(plan.aliases) * BLOCK


@given(prompts(policy="legolink"))
def test_a_span_without_anything_before_it_has_no_gap(prompt: Prompt) -> None:
    first = prompt.layout.spans[0]
    assert bool(prompt.policy.gaps(first)) == (first.start > 0)


@given(prompts())
def test_what_another_tier_holds_is_not_computed(prompt: Prompt) -> None:
    """All keys stored and none cached: each block is loaded once, and only the last one is computed."""
    keys, _ = prompt.keys()
    plan = plan_of(prompt, set(), set(all_keys(prompt)))
    assert not plan.segments
    assert plan.resume_at == (len(prompt.tokens) - 1) // BLOCK * BLOCK
    assert plan.isolated_tokens == plan.gap_tokens == 0
    last = len(plan.hits) - 1
    assert sorted([*plan.loads, *plan.aliases]) == list(range(last))
    assert len({keys[block] for block in plan.loads}) == len(plan.loads)


@given(planned())
def test_a_block_in_the_cache_is_never_loaded(case: tuple[Prompt, set[bytes], ReusePlan]) -> None:
    prompt, cached, plan = case
    keys, _ = prompt.keys()
    assert not {keys[block] for block in plan.loads} & cached
    assert len(plan.hits) - 1 not in plan.loads


@given(prompts(), st.data())
def test_a_hole_in_a_tier_costs_only_itself(prompt: Prompt, data: st.DataObject) -> None:
    _, request_keys = prompt.keys()
    bodies = sorted({key for keys in request_keys.span_keys for key in keys})
    lost = {data.draw(st.sampled_from(bodies))}
    plan = plan_of(prompt, set(), set(all_keys(prompt)) - lost)
    assert plan.isolated_tokens <= BLOCK
    assert plan.gap_tokens == 0


@given(prompts(), st.data())
def test_runs_end_where_a_span_does(prompt: Prompt, data: st.DataObject) -> None:
    """Each block once and in order; neighbours are in one run exactly if one span owns both, or none does."""
    owner: dict[int, int] = {}
    for index, span in enumerate(prompt.layout.spans):
        owner |= dict.fromkeys(blocks(span.start, span.end), index)
    count = len(prompt.tokens) // BLOCK + 1
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    runs = runs_by_span(chosen, prompt.layout, BLOCK)
    assert [block for run in runs for block in run] == chosen
    together = {(a, b) for run in runs for a, b in itertools.pairwise(run)}
    assert together == {
        (a, b) for a, b in itertools.pairwise(chosen) if b == a + 1 and owner.get(a) == owner.get(b)
    }
