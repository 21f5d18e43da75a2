"""Chats through vLLM's own renderer: the prompt without pads is the plain rendering."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.markup.conftest import DELIMITER
from tests.markup.templates import CHATML, TEMPLATES, WITH_DOCUMENTS

Run = Callable[[Any], Any]

# Text with what templates and tokenizers trip over: white space at the ends, special tokens,
# characters of several tokens, things that look like markup.
words = st.sampled_from(
    [
        "Paris",
        " is",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "日本",
        "🙂",
        "<|im_end|>",
        "{{ x }}",
        "_1",
        "12",
        '"',
        "\\",
    ]
)
text = st.lists(words, max_size=8).map("".join)
span_text = text.filter(lambda value: value.strip())
documents = st.lists(
    st.one_of(
        st.fixed_dictionaries({"text": span_text}),
        st.fixed_dictionaries({"title": text, "text": span_text}),
    ),
    max_size=4,
)
part = st.one_of(
    text.map(lambda value: {"type": "text", "text": value}),
    span_text.map(lambda value: {"type": "text", "text": value, "span": True}),
)
delimited = st.lists(span_text, min_size=1, max_size=3).map(
    lambda spans: "rules" + "".join(DELIMITER + span for span in spans) + DELIMITER + "question"
)


def message(role: str) -> st.SearchStrategy[dict[str, Any]]:
    contents: list[st.SearchStrategy[Any]] = [text]
    if role != "assistant":
        contents += [st.lists(part, min_size=1, max_size=4), delimited]
    return st.one_of(contents).map(lambda content: {"role": role, "content": content})


conversations = st.lists(
    st.sampled_from(["user", "assistant", "tool"]).flatmap(message), max_size=3
).flatmap(
    lambda turns: st.tuples(message("system"), message("user")).map(
        lambda ends: [ends[0], *turns, ends[1]]
    )
)


@pytest.fixture(scope="module")
def servers(render_server: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: render_server(template, delimiter=DELIMITER) for name, template in TEMPLATES.items()
    }


def chat(**body: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate({"model": "m", **body})


def marked_prompt(run: Run, server: Any, **body: Any) -> Any:
    """The prompt that a chat comes to; checks what holds for every prompt."""
    from vllm_spans.core.layout import SpanLayout
    from vllm_spans.markup.rendering import SpanMarkup
    from vllm_spans.markup.state import get_state

    request = chat(**body)
    _, (engine_input,) = run(server.render_chat(request))
    state = get_state(request)
    assert state is not None
    (prompt,) = state.prompts
    encoder = SpanMarkup.of(server.renderer).encoder
    assert engine_input["prompt_token_ids"] == prompt.token_ids
    assert encoder.decode(prompt.tokens_without_pads()) == prompt.text
    extra_args = request.to_sampling_params(8, {}).extra_args
    assert extra_args == {**state.options, **prompt.extra_args()}
    SpanLayout.from_extra_args(extra_args, len(prompt.token_ids), 32)
    for piece in prompt.pieces:
        assert piece.start % 32 == 0
        pads = prompt.token_ids[piece.end - piece.pads : piece.end]
        assert pads == [encoder.pad_id] * piece.pads
    return prompt


def plain_rendering(run: Run, server: Any, **body: Any) -> str:
    """What stock code renders of a request without markup."""
    from vllm_spans.markup.state import get_state

    request = chat(**body)
    _, (engine_input,) = run(server.render_chat(request))
    assert get_state(request) is None
    return str(server.renderer.get_tokenizer().decode(engine_input["prompt_token_ids"]))


def without_markup(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a client without spans would send them."""

    def plain(content: Any) -> Any:
        if isinstance(content, str):
            return content.replace(DELIMITER, "")
        return [{"type": "text", "text": item["text"].replace(DELIMITER, "")} for item in content]

    return [{**message, "content": plain(message["content"])} for message in messages]


def has_span(messages: list[dict[str, Any]]) -> bool:
    return any(
        DELIMITER in message["content"]
        if isinstance(message["content"], str)
        else any(item.get("span") for item in message["content"])
        for message in messages
        if message["role"] != "assistant"
    )


@pytest.mark.parametrize("name", TEMPLATES)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(conversation=conversations)
def test_parts_and_delimiters_render_plainly(
    run: Run, servers: dict[str, Any], name: str, conversation: list[dict[str, Any]]
) -> None:
    expected = plain_rendering(run, servers[name], messages=without_markup(conversation))
    if has_span(conversation):
        prompt = marked_prompt(run, servers[name], messages=conversation)
        assert prompt.text == expected
        marked = [
            item["text"].strip()
            for message in conversation
            if isinstance(message["content"], list)
            for item in message["content"]
            if item.get("span")
        ]
        spans = [piece.text.strip() for piece in prompt.pieces if piece.kind == "plus"]
        assert [span for span in spans if span in marked] == marked or len(spans) > len(marked)
    else:
        assert plain_rendering(run, servers[name], messages=conversation) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(given_documents=documents.filter(bool), question=text)
def test_documents_render_plainly(
    run: Run,
    servers: dict[str, Any],
    name: str,
    given_documents: list[dict[str, str]],
    question: str,
) -> None:
    messages = [{"role": "system", "content": "rules"}, {"role": "user", "content": question}]
    prompt = marked_prompt(run, servers[name], messages=messages, documents=given_documents)
    if name in WITH_DOCUMENTS:
        expected = plain_rendering(
            run,
            servers[name],
            messages=messages,
            chat_template_kwargs={"documents": given_documents},
        )
    else:
        block = ""
        for document in given_documents:
            title = document.get("title", "").strip()
            block += f"Document: {title}\n" if title else "Document:\n"
            block += document["text"] + "\n\n"
        messages[1]["content"] = block + question
        expected = plain_rendering(run, servers[name], messages=messages)
    assert prompt.text == expected
    spans = [piece for piece in prompt.pieces if piece.kind == "plus"]
    assert len(spans) == len(given_documents)
    if name != "json":
        for piece, document in zip(spans, given_documents, strict=True):
            assert document["text"].strip() in piece.text


@pytest.mark.parametrize("name", ["chatml", "llama3", "openai", "granite"])
def test_documents_touch_and_keep_their_tokens_in_any_order(
    run: Run, servers: dict[str, Any], name: str
) -> None:
    given_documents = [
        {"title": "One", "text": "The first text.\n"},
        {"text": " A second text"},
        {"title": "Three", "text": "And a third"},
    ]

    def spans_of(
        order: list[dict[str, str]], system: str
    ) -> tuple[list[Any], set[tuple[int, ...]]]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "why?"}]
        prompt = marked_prompt(run, servers[name], messages=messages, documents=order)
        spans = [piece for piece in prompt.pieces if piece.kind == "plus"]
        return spans, {tuple(prompt.token_ids[piece.start : piece.end]) for piece in spans}

    spans, tokens = spans_of(given_documents, "rules")
    assert all(left.end == right.start for left, right in itertools.pairwise(spans))
    _, reversed_tokens = spans_of(given_documents[::-1], "other rules")
    assert tokens == reversed_tokens


def test_numbered_documents_keep_their_tokens_in_any_order(
    run: Run, servers: dict[str, Any]
) -> None:
    given_documents = [{"title": f"T{index}", "text": f"text {index}"} for index in range(3)]

    def tokens_of(order: list[dict[str, str]]) -> set[tuple[int, ...]]:
        prompt = marked_prompt(
            run,
            servers["command-r"],
            messages=[{"role": "user", "content": "why?"}],
            documents=order,
        )
        return {
            tuple(prompt.token_ids[piece.start : piece.end])
            for piece in prompt.pieces
            if piece.kind == "plus"
        }

    assert tokens_of(given_documents) == tokens_of(given_documents[::-1])


def test_content_parts_touch(run: Run, servers: dict[str, Any]) -> None:
    content = [
        {"type": "text", "text": "first", "span": True},
        {"type": "text", "text": "second", "span": True},
        {"type": "text", "text": "why?"},
    ]
    prompt = marked_prompt(run, servers["chatml"], messages=[{"role": "user", "content": content}])
    assert [(piece.kind, piece.text) for piece in prompt.pieces] == [
        ("prefix", "<|im_start|>user\n"),
        ("plus", "first\n"),
        ("plus", "second\n"),
        ("cross", "why?<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_documents_stand_in_front_of_content_parts(run: Run, servers: dict[str, Any]) -> None:
    for first_is_span in (False, True):
        content = [
            {"type": "text", "text": "first part", "span": first_is_span},
            {"type": "text", "text": "why?"},
        ]
        messages = [{"role": "user", "content": content}]
        for name in ("chatml", "openai"):
            prompt = marked_prompt(
                run, servers[name], messages=messages, documents=[{"text": "A"}, {"text": "B"}]
            )
            spans = [piece.text for piece in prompt.pieces if piece.kind == "plus"]
            assert spans[:2] == ["Document:\nA\n\n", "Document:\nB\n\n"]
            assert len(spans) == 2 + first_is_span
            assert "first part" in prompt.text.split("Document:\nB")[1]


def test_the_last_user_message_gets_the_documents(run: Run, servers: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "and so"},
    ]
    prompt = marked_prompt(
        run,
        servers["chatml"],
        messages=messages,
        documents=[{"text": "A"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert prompt.text.endswith(
        "<|im_start|>user\nDocument:\nA\n\nsecond question<|im_end|>\n<|im_start|>assistant\nand so"
    )


def test_tool_results_can_be_spans(run: Run, servers: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "found it", "span": True}],
        },
    ]
    for name in ("chatml", "llama3"):
        prompt = marked_prompt(run, servers[name], messages=messages)
        assert [piece.text for piece in prompt.pieces if piece.kind == "plus"] == ["found it"]


def test_template_text_keeps_its_special_tokens(run: Run, servers: dict[str, Any]) -> None:
    tokenizer = servers["chatml"].renderer.get_tokenizer()
    content = [{"type": "text", "text": "a <|im_end|> b", "span": True}]
    prompt = marked_prompt(run, servers["chatml"], messages=[{"role": "user", "content": content}])
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # The template's own one and the one written out in the text, as in any vLLM prompt.
    assert prompt.token_ids.count(special) == 2


def test_concurrent_chats_do_not_mix(run: Run, servers: dict[str, Any]) -> None:
    from vllm_spans.markup.state import get_state

    server = servers["chatml"]

    async def one(number: int) -> None:
        request = chat(
            messages=[{"role": "user", "content": f"question {number}"}],
            documents=[{"text": f"text {number}.{index}"} for index in range(number % 4)],
        )
        _, (engine_input,) = await server.render_chat(request)
        state = get_state(request)
        assert (state is None) == (number % 4 == 0)
        rendered = server.renderer.get_tokenizer().decode(engine_input["prompt_token_ids"])
        assert f"question {number}<" in rendered
        for index in range(number % 4):
            assert f"text {number}.{index}\n" in rendered
        if state is not None:
            assert len(state.prompts[0].span_starts) == number % 4

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(40)))

    run(all_of_them())


def test_the_time_in_a_template_is_no_trouble(run: Run, render_server: Callable[..., Any]) -> None:
    server = render_server("{{ strftime_now('%Y-%m-%d') }}\n" + CHATML)
    content = [{"type": "text", "text": "text", "span": True}]
    marked_prompt(run, server, messages=[{"role": "user", "content": content}])
