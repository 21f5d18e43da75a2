"""Prevents a bound on reuse that a real cache could beat, or that none could reach."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from loadtests.reuse import PrefixCache, Segment, SpanCache, best

PROMPTS = st.lists(st.text("ab", max_size=12), max_size=8)
SEGMENTS = st.lists(
    st.builds(Segment, st.text("ab", max_size=9), st.booleans()), min_size=1, max_size=5
)


@given(PROMPTS, st.integers(1, 4))
def test_the_prefix_cache_reuses_the_longest_common_prefix_in_blocks(
    prompts: list[str], block: int
) -> None:
    cache = PrefixCache(block)
    for index, prompt in enumerate(prompts):
        common = max((_common(prompt, earlier) for earlier in prompts[:index]), default=0)
        assert cache.add(prompt) == min(common, max(0, len(prompt) - 1)) // block * block


def _common(one: str, two: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )


@given(st.lists(SEGMENTS, max_size=6), st.integers(1, 3))
def test_without_spans_both_caches_are_one(prompts: list[list[Segment]], block: int) -> None:
    found = best([[Segment(s.units) for s in prompt] for prompt in prompts], block, block)
    assert found.span_reused == found.prefix_reused
    assert (found.span_units, found.gap_units) == (0, 0)


@given(st.lists(SEGMENTS, max_size=6), st.integers(1, 3), st.integers(0, 2))
def test_bounds(prompts: list[list[Segment]], block: int, gaps: int) -> None:
    found = best(prompts, block, gaps * block)
    assert 0 <= found.prefix_reused <= found.units
    assert 0 <= found.span_reused + found.gap_units <= found.units
    less = best(prompts, block, (gaps + 1) * block)
    assert less.span_reused <= found.span_reused


@given(st.integers(1, 4), st.integers(0, 2), st.integers(2, 6), st.randoms())
def test_a_new_order_reuses_every_body(
    block: int, gap_blocks: int, count: int, rng: random.Random
) -> None:
    gap = gap_blocks * block
    documents = [f"{number}" * (gap + 3 * block) for number in range(count)]
    cache = SpanCache(block, gap)
    first = [Segment("#" * block), *(Segment(d, True) for d in documents), Segment("?1")]
    assert cache.add(first) == (0, 0)
    order = documents[1:] + documents[:1]
    reused, gaps = cache.add(
        [Segment("#" * block), *(Segment(d, True) for d in order), Segment("?2")]
    )
    assert reused == block + count * 3 * block
    assert gaps == count * gap


def test_a_repeated_prompt_reuses_its_gaps_and_what_follows_too() -> None:
    prompt = [Segment("##"), Segment("abcd", True), Segment("wxyz"), Segment("?")]
    cache = SpanCache(2, 2)
    assert cache.add(prompt) == (0, 0)
    assert cache.add(prompt) == (10, 0)  # but for the block that is not full


def test_text_after_other_spans_is_not_reused() -> None:
    cache = SpanCache(2, 0)
    cache.add([Segment("abcd", True), Segment("wxyz?")])
    assert cache.add([Segment("efgh", True), Segment("wxyz?")]) == (0, 0)
    assert cache.add([Segment("abcd", True), Segment("wxyz!")]) == (8, 0)


def test_pads_count_nowhere() -> None:
    prompt = [Segment("abc", True), Segment("?")]
    assert best([prompt, prompt], 2, 0).units == 8
    assert best([prompt, prompt], 2, 0).span_reused == 3


def test_a_block_that_was_not_full_is_not_kept() -> None:
    cache = SpanCache(2, 0)
    cache.add([Segment("abcd", True), Segment("x")])
    longer = [Segment("abcd", True), Segment("x"), Segment("efgh", True), Segment("?")]
    assert cache.add(longer) == (4, 0)
