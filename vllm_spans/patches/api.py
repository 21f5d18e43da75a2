"""Patches of vLLM's API server: every symbol that is replaced, and why.

Each replacement calls the stock code for a request without markup and passes everything through
unchanged then. vLLM 0.32.0.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any

_MARK = "__vllm_spans_stock__"

PATCHED: list[str] = [
    "vllm.renderers.online_renderer:OnlineRenderer.warmup",
    "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat",
    "vllm.renderers.online_renderer:OnlineRenderer._make_request_with_harmony",
    "vllm.renderers.online_renderer:OnlineRenderer._render_responses_with_harmony",
    "vllm.renderers.online_renderer:OnlineRenderer.preprocess_completion",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion",
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion",
    "vllm.entrypoints.openai.chat_completion.batch_serving:"
    "OpenAIServingChatBatch.render_batch_chat_request",
    "vllm.entrypoints.openai.chat_completion.batch_serving:"
    "OpenAIServingChatBatch.create_batch_chat_completion",
    "vllm.entrypoints.launchers.app:register_api_routers",
]
"""``module:attribute`` of each replaced symbol, as in `vllm_spans.patches`."""


def apply() -> None:
    """Apply the API server's patches; a second call changes nothing."""
    from vllm.entrypoints.launchers import app as launcher_app
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.renderers.online_renderer import OnlineRenderer

    # The server's start: a pad token that the tokenizer does not have must stop it there.
    _replace(OnlineRenderer, "warmup", _warmup)
    # The only way from messages to tokens for templates: spans are found and laid out here.
    _replace(OnlineRenderer, "preprocess_chat", _preprocess_chat)
    # Harmony models (gpt-oss) go past preprocess_chat: markup must be refused, not ignored.
    _replace(OnlineRenderer, "_make_request_with_harmony", _make_request_with_harmony)
    _replace(OnlineRenderer, "_render_responses_with_harmony", _render_responses_with_harmony)
    # The way from prompts to tokens of /v1/completions, /tokenize and token-in-token-out.
    _replace(OnlineRenderer, "preprocess_completion", _preprocess_completion)
    # The layout goes to the engine in SamplingParams.extra_args, made here once per prompt.
    _replace(ChatCompletionRequest, "to_sampling_params", _to_sampling_params)
    _replace(CompletionRequest, "to_sampling_params", _to_sampling_params)
    # Pads are reported in usage, of plain responses and of streams.
    _replace(OpenAIServingChat, "create_chat_completion", _create_with_usage)
    _replace(OpenAIServingCompletion, "create_completion", _create_with_usage)
    # A batch makes a request of its own per conversation; their pads are added up for its usage.
    _replace(OpenAIServingChatBatch, "render_batch_chat_request", _render_batch)
    _replace(OpenAIServingChatBatch, "create_batch_chat_completion", _create_with_usage)
    # vLLM's endpoint plugins need an allowlist flag; a plain `vllm serve` is to have our routes.
    _replace(launcher_app, "register_api_routers", _register_api_routers)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    stock = getattr(owner, name)
    if hasattr(stock, _MARK):
        return
    patched = functools.wraps(stock)(make(stock))
    setattr(patched, _MARK, stock)
    setattr(owner, name, patched)


def _warmup(stock: Callable[..., None]) -> Callable[..., None]:
    def warmup(self: Any) -> None:
        from vllm_spans.markup.rendering import SpanMarkup

        SpanMarkup.of(self.renderer)
        stock(self)

    return warmup


def _preprocess_chat(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def preprocess_chat(
        self: Any, request: Any, messages: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        from vllm_spans.markup.errors import MarkupError
        from vllm_spans.markup.rendering import (
            SpanChatRenderer,
            SpanMarkup,
            SpanOnlineRenderer,
            refuse,
        )
        from vllm_spans.markup.state import get_state

        try:
            spans = SpanMarkup.of(self.renderer)
            markup = spans.read_chat(request, messages)
            if markup is None:
                return await stock(self, request, messages, *args, **kwargs)
            state = get_state(request)
            assert state is not None
            stand_in = SpanOnlineRenderer(self, SpanChatRenderer(spans, markup, state))
            return await stock(stand_in, request, messages, *args, **kwargs)
        except MarkupError as error:
            raise refuse(error, self.renderer.config) from error

    return preprocess_chat


def _make_request_with_harmony(stock: Callable[..., Any]) -> Callable[..., Any]:
    def make_request_with_harmony(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_spans.markup.errors import MarkupError
        from vllm_spans.markup.rendering import SpanMarkup, refuse

        try:
            markup = SpanMarkup.of(self.renderer).read_chat(request, request.messages)
            if markup is not None:
                raise MarkupError(
                    "this model's chats are written by the Harmony encoder, not by a template, and "
                    "cannot hold spans; use /v1/completions with token ids and vllm_xargs.span_starts",
                    markup.sources[0].param,
                    "unsupported",
                )
        except MarkupError as error:
            raise refuse(error, self.renderer.config) from error
        return stock(self, request, *args, **kwargs)

    return make_request_with_harmony


def _render_responses_with_harmony(stock: Callable[..., Any]) -> Callable[..., Any]:
    def render_responses_with_harmony(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_spans.markup.errors import MarkupError
        from vllm_spans.markup.rendering import SpanMarkup, refuse

        given = request.input
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        try:
            SpanMarkup.of(self.renderer).read_chat(request, messages)
        except MarkupError as error:
            raise refuse(error, self.renderer.config) from error
        return stock(self, request, *args, **kwargs)

    return render_responses_with_harmony


def _preprocess_completion(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def preprocess_completion(
        self: Any, request: Any, prompt_input: Any, prompt_embeds: Any, **kwargs: Any
    ) -> Any:
        from vllm_spans.markup.errors import MarkupError
        from vllm_spans.markup.rendering import SpanMarkup, refuse

        try:
            prompts = await SpanMarkup.of(self.renderer).mark_completion(request, prompt_input)
        except MarkupError as error:
            raise refuse(error, self.renderer.config) from error
        if prompts is not None:
            return await self.preprocess_cmpl(request, prompts, **kwargs)
        return await stock(self, request, prompt_input, prompt_embeds, **kwargs)

    return preprocess_completion


def _to_sampling_params(stock: Callable[..., Any]) -> Callable[..., Any]:
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_spans.markup.state import get_state

        params = stock(self, *args, **kwargs)
        if (state := get_state(self)) is not None:
            params.extra_args = {**(params.extra_args or {}), **state.next_extra_args()}
        return params

    return to_sampling_params


def _create_with_usage(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def create(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_spans.markup.state import get_state
        from vllm_spans.markup.usage import add_to_response, add_to_stream

        response = await stock(self, request, *args, **kwargs)
        state = get_state(request)
        if state is None or not state.has_spans:
            return response
        if isinstance(response, AsyncGenerator):
            return add_to_stream(response, state.pad_tokens)
        return add_to_response(response, state.pad_tokens)

    return create


def _render_batch(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def render_batch_chat_request(self: Any, request: Any) -> Any:
        from vllm_spans.markup.state import MarkupState, get_state, set_state

        rendered = await stock(self, request)
        if isinstance(rendered, tuple):
            states = [state for single in rendered[0] if (state := get_state(single)) is not None]
            prompts = [prompt for state in states for prompt in state.prompts]
            if prompts:
                set_state(request, MarkupState({}, prompts))
        return rendered

    return render_batch_chat_request


def _register_api_routers(stock: Callable[..., None]) -> Callable[..., None]:
    def register_api_routers(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
        from vllm_spans.markup import endpoints

        stock(args, app, *rest, **kwargs)
        endpoints.attach(app)

    return register_api_routers
