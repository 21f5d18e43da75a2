"""Prevents: `warm` computing spans whose tokens, and so whose keys, differ from those of the requests that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.markup.conftest import DELIMITER
from tests.markup.templates import TEMPLATES
from vllm_spans.warm.corpus import Document
from vllm_spans.warm.forms import FORMS, Form

Run = Callable[[Any], Any]
Tokens = tuple[int, ...]

# White space at the ends is what templates and joins of parts treat differently by position.
TEXTS = ("Bern is old. It has a river.", "  Ulm\nhas a minster.\n", "Bonn\n\n")
QUESTION = "Which of them is older?"
RULES = {"role": "system", "content": "You answer in one word."}


@pytest.fixture(scope="module")
def servers(render_server: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: render_server(template, delimiter=DELIMITER) for name, template in TEMPLATES.items()
    }


def spans_of(run: Run, server: Any, body: dict[str, Any]) -> list[Tokens]:
    """Tokens of a request's spans, in order."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from vllm_spans.markup.state import get_state

    request = ChatCompletionRequest.model_validate(body)
    run(server.render_chat(request))
    state = get_state(request)
    assert state is not None
    (prompt,) = state.prompts
    assert prompt.pieces[-1].kind == "cross", "the last piece is not padded, so it must be no span"
    return [
        tuple(prompt.token_ids[piece.start : piece.end])
        for piece in prompt.pieces
        if piece.kind == "plus"
    ]


def traffic(form: str, documents: list[Document]) -> dict[str, Any]:
    """A request as a client sends it: rules in front, the documents, a question."""
    user: dict[str, Any] = {"role": "user", "content": QUESTION}
    body: dict[str, Any] = {"model": "m", "messages": [RULES, user]}
    if form == "documents":
        body["documents"] = [
            {"text": d.text} if d.title is None else {"title": d.title, "text": d.text}
            for d in documents
        ]
    elif form == "part":
        user["content"] = [
            {"type": "text", "text": "See:"},
            *({"type": "text", "text": d.text, "span": True} for d in documents),
            {"type": "text", "text": QUESTION},
        ]
    else:
        user["content"] = "See: " + "".join(DELIMITER + d.text for d in documents)
        user["content"] += DELIMITER + QUESTION
    return body


@pytest.mark.parametrize("titled", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_warmed_spans_are_those_of_requests(
    run: Run, servers: dict[str, Any], template: str, form: Any, titled: bool
) -> None:
    server = servers[template]
    # A template that escapes the white space at a text's end makes it a part of what stands between documents: if
    # that differs, requests themselves share no spans but by chance.
    texts = [text.strip() for text in TEXTS] if template == "json" else TEXTS
    documents = [
        Document(f"{index}", text, f"Title {index}" if titled else None, len(text))
        for index, text in enumerate(texts)
    ]
    warm = Form(form, "m", DELIMITER)
    expected = spans_of(run, server, traffic(form, documents))
    assert len(set(expected)) == 3
    reordered = spans_of(run, server, traffic(form, documents[::-1]))
    assert reordered == expected[::-1], "requests do not share spans: the test compares nothing"
    assert all(warm.problem(document) is None for document in documents)
    together = spans_of(run, server, warm.body(documents))
    assert together[:3] == expected
    for document, tokens in zip(documents, expected, strict=True):
        assert spans_of(run, server, warm.body([document]))[0] == tokens


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_alone_is_for_requests_with_one_document(
    run: Run, servers: dict[str, Any], template: str, form: Any
) -> None:
    document = Document("0", TEXTS[0], None, 0)
    warm = Form(form, "m", DELIMITER, alone=True)
    expected = spans_of(run, servers[template], traffic(form, [document]))
    assert spans_of(run, servers[template], warm.body([document])) == expected
    assert not warm.can_share(document, document)


def test_a_frame_around_documents_is_told_apart_from_none(
    run: Run, servers: dict[str, Any]
) -> None:
    """What the companion and `alone` are for: this template's frame belongs to the spans of several documents."""
    document = Document("0", TEXTS[0], None, 0)
    beside, alone = (
        spans_of(run, servers["granite"], Form("documents", "m", alone=alone).body([document]))
        for alone in (False, True)
    )
    assert beside[0] != alone[0]


def test_a_text_that_runs_into_the_delimiter_is_named() -> None:
    form = Form("text", "m", "%%")
    for text in ("a%%b", "a%", "%%"):
        assert "'%%'" in (form.problem(Document("x", text, None, 0)) or "")
    for text in ("a", "%a", "a % b"):
        assert form.problem(Document("x", text, None, 0)) is None


def test_requests_compute_all_of_a_span_for_the_right_tenant() -> None:
    document = Document("x", "text", None, 0)
    body = Form("documents", "adapter", cache_salt="s").body([document])
    assert body["spans"] == {"gap_policy": "none"}
    assert (body["model"], body["cache_salt"], body["max_tokens"]) == ("adapter", "s", 1)
    assert "cache_salt" not in Form("documents", "m").body([document])


def test_titled_and_untitled_documents_do_not_share_a_request() -> None:
    titled, untitled = Document("x", "text", "T", 0), Document("y", "text", None, 0)
    assert not Form("documents", "m").can_share(titled, untitled)
    assert Form("documents", "m").can_share(titled, titled)
    assert Form("part", "m").can_share(titled, untitled)
