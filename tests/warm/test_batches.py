"""Prevents: documents lost between requests, or requests longer than the model's context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.warm.batches import Batcher, Pending
from vllm_spans.warm.corpus import Document

OVERHEAD = 40


def pending(index: int, tokens: int, title: str | None = None) -> Pending:
    return Pending(Document(f"{index}", "text", title, 0), tokens, {}, OVERHEAD)


def same_title(one: Document, two: Document) -> bool:
    return one.title == two.title


@given(
    st.lists(st.tuples(st.integers(1, 900), st.sampled_from([None, "T"])), max_size=40),
    st.integers(1, 1000),
    st.one_of(st.none(), st.integers(100, 2000)),
)
def test_every_document_comes_once_within_the_limits(
    given_documents: list[tuple[int, str | None]], limit: int, prompt_limit: int | None
) -> None:
    batcher = Batcher(limit, prompt_limit, same_title)
    documents = [
        pending(index, tokens, title) for index, (tokens, title) in enumerate(given_documents)
    ]
    batches = [batch for document in documents if (batch := batcher.add(document))]
    batches += batcher.flush()
    out = [member for batch in batches for member in batch]
    assert sorted(out, key=lambda p: int(p.document.name)) == documents
    for batch in batches:
        tokens = sum(member.tokens for member in batch)
        assert len({member.document.title for member in batch}) == 1
        if len(batch) > 1:
            assert tokens <= limit
            assert prompt_limit is None or tokens + OVERHEAD + 1 <= prompt_limit
    assert batcher.flush() == []


def test_a_request_is_filled_before_the_next_is_begun() -> None:
    batcher = Batcher(100, None, same_title)
    first = [pending(index, 50) for index in range(2)]
    assert [batcher.add(document) for document in first] == [[], []]
    third = pending(2, 1)
    assert batcher.add(third) == first
    assert batcher.flush() == [[third]]
