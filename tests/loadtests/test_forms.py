"""Prevents requests whose marks a server reads in another way than was meant, or that differ between two servers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.forms import CHAT_PATH, COMPLETIONS_PATH, FORMS, Form
from loadtests.prompts import Message, Piece, ToolCall, Turn
from tests.loadtests.prompts import TURNS
from vllm_spans.core.layout import SpanLayout
from vllm_spans.markup.delimiter import split_delimited

DELIMITER = Form.delimiter


def body(turn: Turn, name: str, marked: bool = True, **settings: Any) -> dict[str, Any]:
    return Form(name=name, model="m", marked=marked, **settings).request(turn)[1]


def merged(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbouring ordinary texts are one for a server."""
    result = []
    for is_span, group in itertools.groupby(pieces, lambda piece: piece[1]):
        texts = [text for text, _ in group if text]
        result += [(t, True) for t in texts] if is_span else [("".join(texts), False)]
    return [piece for piece in result if piece[0]]


@given(TURNS)
def test_the_product_reads_delimiters_as_meant(turn: Turn) -> None:
    for message, sent in zip(turn.messages, body(turn, "delimiter")["messages"], strict=True):
        read = [(p.text, p.is_span) for p in split_delimited(sent["content"], DELIMITER, "")]
        assert merged(read) == merged([(p.text, p.is_span) for p in message.pieces])


@given(TURNS)
def test_the_product_reads_a_delimited_prompt_as_meant(turn: Turn) -> None:
    read = split_delimited(body(turn, "text")["prompt"], DELIMITER, "")
    meant = [(piece.text, piece.is_span) for piece in turn.pieces()]
    assert merged([(p.text, p.is_span) for p in read]) == merged(meant)


@given(TURNS, st.sampled_from([16, 32]))
def test_the_product_reads_offsets_as_meant(turn: Turn, block_size: int) -> None:
    # The block of a prompt's last token is no part of a span.
    turn = Turn((*turn.messages, Message("user", (Piece("end"),))), 1)
    form = Form(name="offsets", model="m", block_size=block_size)
    path, sent = form.request(turn)
    assert path == COMPLETIONS_PATH
    arguments = sent.get("vllm_xargs", {})
    layout = SpanLayout.from_extra_args(arguments, len(sent["prompt"]), block_size)
    spans = [piece.text for piece in turn.pieces() if piece.is_span]
    pad = form.vocabulary[0]
    found = [
        [token for token in sent["prompt"][span.start : span.end] if token != pad]
        for span in (layout.spans if layout else ())
    ]
    assert found == [form.tokens(text) for text in spans]
    assert arguments.get("span_pad_tokens", 0) == sent["prompt"].count(pad)
    everything = [token for token in sent["prompt"] if token != pad]
    assert everything == [token for p in turn.pieces() for token in form.tokens(p.text)]


@given(TURNS)
def test_without_marks_the_text_is_the_same(turn: Turn) -> None:
    assert body(turn, "offsets", False)["prompt"] == body(turn, "offsets")["prompt"]
    for name in ("delimiter", "parts"):
        for sent, plain in zip(
            body(turn, name)["messages"], body(turn, name, False)["messages"], strict=True
        ):
            assert _text(plain["content"]) == _text(sent["content"]).replace(DELIMITER, "")
    assert body(turn, "text", False)["prompt"] == body(turn, "text")["prompt"].replace(
        DELIMITER, ""
    )
    for name in FORMS:
        unmarked = repr(body(turn, name, False, gap_policy="none"))
        assert not any(
            mark in unmarked
            for mark in ("'span'", "'spans'", "vllm_xargs", "'documents'", DELIMITER)
        )


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@given(TURNS)
def test_parts_mark_what_is_a_span(turn: Turn) -> None:
    for message, sent in zip(turn.messages, body(turn, "parts")["messages"], strict=True):
        if isinstance(sent["content"], str):
            assert not any(piece.is_span for piece in message.pieces)
        else:
            read = [(part["text"], part.get("span", False)) for part in sent["content"]]
            assert read == [(piece.text, piece.is_span) for piece in message.pieces]


@given(TURNS)
def test_documents_are_the_spans_of_users(turn: Turn) -> None:
    users = [piece for m in turn.messages if m.role == "user" for piece in m.pieces]
    spans = [piece for piece in users if piece.is_span]
    marked, plain = body(turn, "documents"), body(turn, "documents", False)
    assert [found["text"] for found in marked.get("documents", [])] == [p.text for p in spans]
    said = [_text(message["content"]) for message in plain["messages"] if message["role"] == "user"]
    if spans:
        # What the server writes for a template that ignores documents (docs/markup.md).
        context = "".join(
            f"Document:{' ' + p.title if p.title else ''}\n{p.text}\n\n" for p in spans
        )
        assert said[-1].startswith(context)
        assert context not in "".join(said[:-1])


TURN = Turn(
    (
        Message("user", (Piece("doc", True), Piece("what?"))),
        Message("assistant", (Piece(""),), (ToolCall("c1", "read", "{}"),)),
        Message("tool", (Piece("result", True),), tool_call_id="c1"),
    ),
    9,
)


@pytest.mark.parametrize("name", FORMS)
def test_every_request_streams_and_asks_for_usage(name: str) -> None:
    path, sent = Form(name=name, model="m", ignore_eos=True, extra={"top_k": 3}).request(TURN)
    assert path == (COMPLETIONS_PATH if name in ("text", "offsets") else CHAT_PATH)
    assert sent["stream"] and sent["stream_options"] == {"include_usage": True}
    assert (sent["model"], sent["max_tokens"], sent["ignore_eos"], sent["top_k"]) == (
        "m",
        9,
        True,
        3,
    )


def test_options_of_spans_are_sent_with_spans_only() -> None:
    plain = Turn((Message("user", (Piece("hi"),)),), 1)
    settings = {"gap_policy": "legolink", "gap_length": 64}
    assert body(TURN, "parts", **settings)["spans"] == settings
    assert "spans" not in body(plain, "parts", **settings)


def test_tool_calls_are_written_as_openai_does() -> None:
    sent = body(TURN, "parts")["messages"]
    assert sent[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    ]
    assert sent[2]["tool_call_id"] == "c1"
    assert sent[2]["content"] == [{"type": "text", "text": "result", "span": True}]
