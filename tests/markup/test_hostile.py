"""Prevents a body that no client would send from becoming a 500 or from holding the server up."""

import json

import pytest

from vllm_spans.markup import refusal
from vllm_spans.markup.sentinels import _common_prefix


@pytest.mark.parametrize("xargs", [[1], [None], "span_starts", 3, True])
def test_xargs_of_another_type_are_left_to_vllm(xargs: object) -> None:
    body = json.dumps({"vllm_xargs": xargs, "x": "span"}).encode()
    assert refusal._look(body, "/v1/responses") is None


def test_a_body_nested_too_deep_is_left_to_vllm() -> None:
    assert refusal._look(b'{"span":' + b"[" * 200_000, "/v1/messages") is None
    deep = b'{"span":' + b"[" * 900 + b"]" * 900 + b"}"
    assert refusal._look(deep, "/v1/messages") is None


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [
        ("", "", 0),
        ("ab", "abc", 2),
        ("abc", "ab", 2),
        ("xb", "ab", 0),
        (" " * 10**6, " " * 10**6, 10**6),
    ],
)
def test_common_prefix(left: str, right: str, count: int) -> None:
    """One pass: a million spaces behind a span take no more than a pass over them."""
    assert _common_prefix(left, right) == count
