"""Prevents a block from being found by a request that it is wrong for."""

from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import BLOCK, ROOT, Prompt, prompts, sha
from vllm_spans.core.hashing import SpanKeyMemo
from vllm_spans.core.layout import SpanLayout
from vllm_spans.core.policy import make_policy


def stock_keys(prompt: Prompt) -> list[bytes]:
    """vLLM's own chain over the same tokens."""
    parent, keys = ROOT, []
    for start in range(0, len(prompt.tokens) // BLOCK * BLOCK, BLOCK):
        tokens = tuple(prompt.tokens[start : start + BLOCK])
        parent = sha((parent, tokens, prompt.extra_keys(start, start + BLOCK)))
        keys.append(parent)
    return keys


def document(number: int, blocks: int = 3) -> list[int]:
    return [100 * number + index for index in range(BLOCK * blocks)]


def lay_out(
    *pieces: list[int], prefix: list[int], policy: str = "legolink", salt: str | None = None
) -> Prompt:
    tokens, starts = list(prefix), []
    for piece in pieces:
        starts.append(len(tokens))
        tokens += piece
    cross = len(tokens)
    tokens += [7] * (BLOCK + 1)
    layout = SpanLayout.from_extra_args(
        {"span_starts": starts, "cross_span_starts": [cross]}, len(tokens), BLOCK
    )
    assert layout is not None
    return Prompt(tokens, layout, make_policy(policy, BLOCK), salt)


def body_keys(prompt: Prompt, span: int) -> list[bytes]:
    keys, request_keys = prompt.keys()
    first, last = (
        edge // BLOCK for edge in (prompt.layout.spans[span].start, prompt.layout.spans[span].end)
    )
    return [keys[block] for block in range(first, last) if request_keys.is_span_key[block]]


@given(prompts())
def test_prefix_keys_are_the_stock_ones_and_no_later_key_is(prompt: Prompt) -> None:
    keys, _ = prompt.keys()
    prefix = prompt.layout.prefix_end // BLOCK
    stock = stock_keys(prompt)
    assert keys[:prefix] == stock[:prefix]
    assert not set(keys[prefix:]) & set(stock)


@given(prompts(), st.data())
def test_keys_do_not_depend_on_how_tokens_arrive(prompt: Prompt, data: st.DataObject) -> None:
    whole, _ = prompt.keys()
    output = data.draw(st.lists(st.integers(1, 50), min_size=BLOCK, max_size=3 * BLOCK))
    cut = data.draw(st.integers(0, len(output)))
    _, request_keys = prompt.keys()
    grown = prompt.tokens + output[:cut]
    in_pieces = whole + request_keys.extend(grown, prompt.extra_keys)
    in_pieces += request_keys.extend(prompt.tokens + output, prompt.extra_keys)
    at_once = Prompt(prompt.tokens + output, prompt.layout, prompt.policy).keys()[0]
    assert in_pieces == at_once
    assert (
        len(set(at_once)) >= len(at_once) - sum(len(span) for span in prompt.layout.spans) // BLOCK
    )


def test_a_span_body_has_one_key_wherever_it_stands() -> None:
    first = lay_out(document(1), document(2), prefix=[1] * BLOCK)
    second = lay_out(document(2), document(1), prefix=[2] * (2 * BLOCK))
    assert body_keys(first, 0) == body_keys(second, 1)
    assert body_keys(first, 1) == body_keys(second, 0)


def test_gap_and_cross_keys_depend_on_everything_before() -> None:
    base = lay_out(document(1), document(2), prefix=[1] * BLOCK)
    keys, flags = base.keys()[0], base.keys()[1].is_span_key
    for other in (
        lay_out(document(1), document(2), prefix=[2] * BLOCK),
        lay_out(document(3), document(2), prefix=[1] * BLOCK),
        lay_out(document(1), document(2), prefix=[1] * BLOCK, policy="none"),
    ):
        other_keys, other_flags = other.keys()[0], other.keys()[1].is_span_key
        second_gap = (BLOCK + 3 * BLOCK) // BLOCK
        if not other_flags[second_gap]:
            assert keys[second_gap] != other_keys[second_gap]
        cross = (BLOCK + 6 * BLOCK) // BLOCK
        assert not flags[cross] and not other_flags[cross]
        assert keys[cross] != other_keys[cross]


def test_the_same_tokens_cut_into_other_spans_are_other_context() -> None:
    one = lay_out(document(1, 4), prefix=[1] * BLOCK, policy="none")
    two = lay_out(
        document(1, 4)[: 2 * BLOCK], document(1, 4)[2 * BLOCK :], prefix=[1] * BLOCK, policy="none"
    )
    assert one.keys()[0][-1] != two.keys()[0][-1]
    assert body_keys(one, 0)[2:] != body_keys(two, 1)


@given(prompts())
def test_no_key_is_shared_between_tenants(prompt: Prompt) -> None:
    mine = Prompt(prompt.tokens, prompt.layout, prompt.policy, "mine").keys()
    yours = Prompt(prompt.tokens, prompt.layout, prompt.policy, "yours").keys()
    nobody = prompt.keys()
    for left, right in ((mine, yours), (mine, nobody), (yours, nobody)):
        assert not set(left[0]) & set(right[0])
        spans_left = {key for keys in left[1].span_keys for key in keys}
        spans_right = {key for keys in right[1].span_keys for key in keys}
        assert not spans_left & spans_right


def test_a_conversation_that_grows_keeps_its_keys() -> None:
    first = lay_out(document(1), document(2), prefix=[1] * BLOCK)
    turn = first.tokens[: len(first.tokens) // BLOCK * BLOCK]
    tokens = [*turn, *[9] * BLOCK, *document(3), *[8] * (BLOCK + 1)]
    spans = [span.start for span in first.layout.spans]
    new = len(turn) + BLOCK
    layout = SpanLayout.from_extra_args(
        {
            "span_starts": [*spans, new],
            "cross_span_starts": [first.layout.cross_starts[0], new + 3 * BLOCK],
        },
        len(tokens),
        BLOCK,
    )
    assert layout is not None
    grown = Prompt(tokens, layout, first.policy).keys()[0]
    assert grown[: len(turn) // BLOCK] == first.keys()[0]


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=30))
def test_the_memo_changes_no_key_and_stays_small(numbers: list[int]) -> None:
    memo = SpanKeyMemo(sha, BLOCK, capacity=2 * 3 * BLOCK)
    for number in numbers:
        assert memo.keys(b"r", document(number)) == SpanKeyMemo(sha, BLOCK).keys(
            b"r", document(number)
        )
        assert len(memo._keys) <= 2
