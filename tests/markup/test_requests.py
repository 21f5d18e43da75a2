"""Completions and refusals through vLLM's own renderer: what is served and what is a 400 by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.markup.conftest import DELIMITER, TOKEN_CROSS, TOKEN_PLUS
from tests.markup.templates import CHATML

Run = Callable[[Any], Any]
SPAN_PART = {"type": "text", "text": "a document", "span": True}
TOKENS = [TOKEN_PLUS + 2] * 96


@pytest.fixture(scope="module")
def server(render_server: Callable[..., Any]) -> Any:
    return render_server(
        CHATML,
        max_model_len=512,
        delimiter=DELIMITER,
        token_plus=TOKEN_PLUS,
        token_cross=TOKEN_CROSS,
        max_spans=3,
    )


def completion(**body: Any) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return CompletionRequest.model_validate({"model": "m", **body})


def chat(**body: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body.setdefault("messages", [{"role": "user", "content": [SPAN_PART]}])
    return ChatCompletionRequest.model_validate({"model": "m", **body})


def refusal(run: Run, awaitable: Any) -> Any:
    """The 400 that a request ends in, in OpenAI's shape."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as caught:
        run(awaitable)
    error = create_error_response(caught.value).error
    assert error.code == 400
    assert error.type == "BadRequestError"
    return error


def test_delimited_text(run: Run, server: Any) -> None:
    prompt = f"rules{DELIMITER}document A{DELIMITER}document B{DELIMITER}question"
    request = completion(prompt=prompt, n=2, echo=True)
    (engine_input,) = run(server.render_completion(request))
    assert engine_input["prompt"] == "rulesdocument Adocument Bquestion"
    assert request.to_sampling_params(4).extra_args == {
        "span_starts": [32, 64],
        "cross_span_starts": [96],
        "span_pad_tokens": 96
        - sum(
            len(server.renderer.get_tokenizer().encode(text))
            for text in ("rules", "document A", "document B")
        ),
    }


def test_a_batch_is_laid_out_prompt_by_prompt(run: Run, server: Any) -> None:
    prompts = [f"{DELIMITER}A{DELIMITER}q", "plain", f"x{DELIMITER}B{DELIMITER}C{DELIMITER}q"]
    request = completion(prompt=prompts, spans={"gap_policy": "none"})
    engine_inputs = run(server.render_completion(request))
    plain = completion(prompt="plain")
    (expected,) = run(server.render_completion(plain))
    assert engine_inputs[1]["prompt_token_ids"] == expected["prompt_token_ids"]
    found = [request.to_sampling_params(4).extra_args for _ in prompts]
    assert [args.get("span_starts") for args in found] == [[0], None, [32, 64]]
    assert all(args["span_gap_policy"] == "none" for args in found)
    assert plain.to_sampling_params(4).extra_args is None


def test_offsets_pass_the_tokens_on_as_they_are(run: Run, server: Any) -> None:
    xargs = {"span_starts": [0, 32], "cross_span_starts": [64], "mine": 1}
    request = completion(prompt=TOKENS, vllm_xargs=xargs)
    (engine_input,) = run(server.render_completion(request))
    assert engine_input["prompt_token_ids"] == TOKENS
    assert request.to_sampling_params(4).extra_args == {**xargs, "span_pad_tokens": 0}


def test_markers_at_block_starts(run: Run, server: Any) -> None:
    tokens = [TOKEN_PLUS + 2, TOKEN_PLUS] * 16 + [TOKEN_PLUS] * 32 + [TOKEN_CROSS] * 5
    request = completion(prompt=tokens)
    (engine_input,) = run(server.render_completion(request))
    assert engine_input["prompt_token_ids"] == tokens
    args = request.to_sampling_params(4).extra_args
    assert (args["span_starts"], args["cross_span_starts"]) == ([32], [64])


def test_options_without_spans_are_checked_and_change_nothing(run: Run, server: Any) -> None:
    request = completion(prompt="plain", spans={"gap_length": 64})
    run(server.render_completion(request))
    assert request.to_sampling_params(4).extra_args == {"span_gap_length": 64}
    error = refusal(run, server.render_completion(completion(prompt="plain", spans={"k": 1})))
    assert error.param == "spans.k"


def test_without_a_delimiter_its_text_is_ordinary(
    run: Run, render_server: Callable[..., Any], server: Any
) -> None:
    off = render_server(CHATML)
    text = f"{DELIMITER}A{DELIMITER}q"
    request = completion(prompt=text)
    (engine_input,) = run(off.render_completion(request))
    tokenizer = off.renderer.get_tokenizer()
    assert tokenizer.decode(engine_input["prompt_token_ids"]) == text
    assert request.to_sampling_params(4).extra_args is None
    request = chat(messages=[{"role": "user", "content": text}])
    _, (engine_input,) = run(off.render_chat(request))
    assert text in tokenizer.decode(engine_input["prompt_token_ids"])
    tokens = [TOKEN_PLUS] * 64
    request = completion(prompt=tokens)
    run(off.render_completion(request))
    assert request.to_sampling_params(4).extra_args is None


def test_the_models_own_turns_may_quote_the_delimiter(run: Run, server: Any) -> None:
    request = chat(
        messages=[
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": f"use {DELIMITER}"},
            {"role": "user", "content": "why?"},
        ]
    )
    run(server.render_chat(request))
    assert request.to_sampling_params(4, {}).extra_args is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"spans": {"gapp": 1}}, "spans.gapp"),
        ({"spans": {"gap_policy": "no"}}, "spans.gap_policy"),
        ({"spans": {"gap_length": 31}}, "spans.gap_length"),
        ({"vllm_xargs": {"span_starts": [0]}}, "vllm_xargs.span_starts"),
        ({"vllm_xargs": {"span_pad_tokens": 0}}, "vllm_xargs.span_pad_tokens"),
        ({"vllm_xargs": {"span_what": 0}}, "vllm_xargs.span_what"),
        ({"vllm_xargs": {"span_gap_policy": 5}}, "vllm_xargs.span_gap_policy"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": True, "top_logprobs": 1}, "echo"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ({"return_token_offsets": True, "return_token_ids": True}, "return_token_offsets"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
        ({"documents": [{"title": "no text"}]}, "documents[0].text"),
        ({"documents": [{"text": "a"}, {"text": " \n"}]}, "documents[1].text"),
        ({"documents": [{"text": f"d{n}"} for n in range(3)]}, "messages[0].content[0].span"),
        ({"documents": [{"text": f"d{n}"} for n in range(5)]}, "documents[3]"),
        ({"documents": [{"text": "word " * 600}]}, "input_tokens"),
        (
            {"messages": [{"role": "system", "content": "x"}], "documents": [{"text": "a"}]},
            "documents",
        ),
    ],
)
def test_chat_refusals(run: Run, server: Any, body: dict[str, Any], param: str) -> None:
    error = refusal(run, server.render_chat(chat(**body)))
    assert error.param == param


@pytest.mark.parametrize(
    ("content", "role", "param"),
    [
        ([SPAN_PART], "assistant", "messages[1].content[0].span"),
        ([{**SPAN_PART, "span": "yes"}], "user", "messages[1].content[0].span"),
        ([{**SPAN_PART, "span": 1}], "user", "messages[1].content[0].span"),
        ([{**SPAN_PART, "text": ""}], "user", "messages[1].content[0].span"),
        ([{**SPAN_PART, "text": " \n "}], "tool", "messages[1].content[0].span"),
        (
            [{"type": "refusal", "refusal": "no", "span": True}],
            "user",
            "messages[1].content[0].span",
        ),
        (f"one {DELIMITER} alone", "user", "messages[1].content"),
        (f"{DELIMITER} \n{DELIMITER}", "user", "messages[1].content"),
        ([{"type": "text", "text": f"one {DELIMITER}"}], "user", "messages[1].content[0].text"),
        (
            [SPAN_PART, {"type": "image_url", "image_url": {"url": "data:,x"}}],
            "user",
            "messages",
        ),
    ],
)
def test_message_refusals(run: Run, server: Any, content: Any, role: str, param: str) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": role, "content": content}]
    assert refusal(run, server.render_chat(chat(messages=messages))).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"vllm_xargs": {"span_starts": [16]}}, "vllm_xargs.span_starts"),
        ({"vllm_xargs": {"span_starts": [32, 0]}}, "vllm_xargs.span_starts"),
        ({"vllm_xargs": {"span_starts": [96]}}, "vllm_xargs.span_starts"),
        ({"vllm_xargs": {"span_starts": ["0"]}}, "vllm_xargs.span_starts"),
        (
            {"vllm_xargs": {"span_starts": [0], "cross_span_starts": [33]}},
            "vllm_xargs.cross_span_starts",
        ),
        ({"prompt": "text", "vllm_xargs": {"span_starts": [0]}}, "vllm_xargs.span_starts"),
        (
            {"prompt": [TOKENS, TOKENS], "vllm_xargs": {"span_starts": [0]}},
            "vllm_xargs.span_starts",
        ),
        ({"vllm_xargs": {"span_starts": [0]}, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"vllm_xargs": {"span_starts": [0]}, "echo": True, "logprobs": 1}, "echo"),
        ({"vllm_xargs": {"span_starts": [0]}, "use_beam_search": True}, "use_beam_search"),
        (
            {"vllm_xargs": {"span_starts": [0]}, "truncate_prompt_tokens": 9},
            "truncate_prompt_tokens",
        ),
        ({"prompt": f"{DELIMITER}a{DELIMITER}b", "suffix": "c"}, "suffix"),
        ({"prompt": f"a{DELIMITER}b"}, "prompt"),
        ({"prompt": ["x", f"a{DELIMITER}b"]}, "prompt[1]"),
        ({"prompt": f"a{DELIMITER}{DELIMITER}b"}, "prompt"),
        ({"prompt": [TOKEN_PLUS] * 160}, "prompt"),
    ],
)
def test_completion_refusals(run: Run, server: Any, body: dict[str, Any], param: str) -> None:
    async def create() -> Any:
        result = await server.render_completion(completion(**{"prompt": TOKENS, **body}))
        # vLLM refuses some combinations before the markup is looked at.
        if hasattr(result, "error"):
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(result.error.message, parameter=result.error.param)
        return result

    assert refusal(run, create()).param == param


def test_refusals_are_counted(run: Run, server: Any) -> None:
    from prometheus_client import REGISTRY

    def count() -> float:
        return (
            REGISTRY.get_sample_value(
                "vllm_spans_rejected_total",
                {"model_name": server.model_config.served_model_name, "reason": "unknown_option"},
            )
            or 0.0
        )

    before = count()
    refusal(run, server.render_chat(chat(spans={"what": 1})))
    assert count() == before + 1


def test_a_layout_given_to_the_engines_own_endpoint_is_checked(run: Run, server: Any) -> None:
    from vllm.sampling_params import SamplingParams

    class Request:
        def __init__(self, **extra_args: Any) -> None:
            self.sampling_params = SamplingParams(extra_args=extra_args)

    async def preprocess(request: Any) -> Any:
        return await server.preprocess_completion(request, TOKENS, None)

    error = refusal(run, preprocess(Request(span_starts=[7])))
    assert error.param == "sampling_params.extra_args.span_starts"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_keep_a_span_whole_is_a_400(
    run: Run, render_server: Callable[..., Any], template: str
) -> None:
    error = refusal(run, render_server(template).render_chat(chat()))
    assert error.param == "messages[0].content[0].span"
    assert "template" in error.message


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": [SPAN_PART]}], f"{DELIMITER}a{DELIMITER}b"]
)
def test_harmony_models_refuse_markup_in_chats(
    run: Run, server: Any, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    """GPT-OSS: vLLM writes its chats without a template, past everything that reads markup elsewhere."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    monkeypatch.setattr(server, "use_harmony", True)
    if isinstance(messages, str):
        responses = ResponsesRequest.model_validate({"model": "m", "input": messages})
        error = refusal(run, server.render_responses(responses))
        assert error.param == "input" and "/v1/responses" in error.message
        messages = [{"role": "user", "content": messages}]
    error = refusal(run, server.render_chat(chat(messages=messages)))
    assert error.param is not None and error.param.startswith("messages[0].content")
    assert "/v1/completions" in error.message


def test_the_pad_token_is_checked_at_the_start(render_server: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="VLLM_V1_SPANS_PAD_TOKEN"):
        render_server(CHATML, pad_token="not one token")


def test_patches_are_applied_once(patched: None) -> None:
    from vllm.renderers.online_renderer import OnlineRenderer

    from vllm_spans.patches import api

    first = OnlineRenderer.preprocess_chat
    api.apply()
    assert OnlineRenderer.preprocess_chat is first
