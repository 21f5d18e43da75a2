"""Markup at work in vLLM's renderer: a request goes in, engine inputs and the request's state come out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams
from vllm.renderers.chat_utils import has_non_text_content
from vllm.renderers.inputs.preprocess import prompt_to_seq

from vllm_spans.config import SpansConfig
from vllm_spans.markup.chat import ChatMarkup, has_chat_markup
from vllm_spans.markup.delimiter import split_delimited
from vllm_spans.markup.encoder import PieceEncoder
from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.offsets import from_markers, from_offsets, has_offsets
from vllm_spans.markup.options import LAYOUT_ARGS, read_options
from vllm_spans.markup.pieces import MarkedPrompt, TextPiece, assemble
from vllm_spans.markup.sentinels import Sentinels
from vllm_spans.markup.state import MarkupState, set_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_vllm_spans_markup"


def refuse(error: MarkupError, config: VllmConfig) -> VLLMValidationError:
    """The HTTP 400 for an error in the markup; counts it for the model of this configuration."""
    from vllm_spans.metrics import counters

    counters.rejected(str(config.model_config.served_model_name), error.reason)
    return VLLMValidationError(str(error), parameter=error.param)


class SpanMarkup:
    """Markup of one server: settings, block size and encoder.

    Args:
        renderer: vLLM's renderer.

    Raises:
        ValueError: The configured pad token does not fit the tokenizer.
    """

    def __init__(self, renderer: BaseRenderer) -> None:
        self.renderer = renderer
        self.config = SpansConfig.from_vllm_config(renderer.config)
        self.block_size: int = renderer.config.cache_config.block_size
        self._encoder: PieceEncoder | None = None
        if renderer.tokenizer is not None:
            self._encoder = PieceEncoder(renderer.tokenizer, self.config.pad_token)

    @classmethod
    def of(cls, renderer: BaseRenderer) -> SpanMarkup:
        """The markup of a renderer, made once."""
        found = renderer.__dict__.get(_ATTRIBUTE)
        if not isinstance(found, cls):
            found = cls(renderer)
            setattr(renderer, _ATTRIBUTE, found)
        return found

    @property
    def encoder(self) -> PieceEncoder:
        """The encoder.

        Raises:
            MarkupError: The server runs without a tokenizer.
        """
        if self._encoder is None:
            raise MarkupError(
                "the server runs without a tokenizer (--skip-tokenizer-init): send token ids with "
                "vllm_xargs.span_starts",
                "prompt",
                "unsupported",
            )
        return self._encoder

    # Chat

    def read_chat(self, request: Any, messages: Sequence[Any]) -> ChatMarkup | None:
        """Find a chat request's markup and options.

        Args:
            request: A request that renders messages.
            messages: Its messages.

        Returns:
            The markup, ``None`` for a request without. Options without spans are kept in the
            request's state; they change nothing but are checked.

        Raises:
            MarkupError: Markup or options that cannot be served.
        """
        if not _has_field(request, "messages"):
            self._refuse_elsewhere(request, messages)
            return None
        xargs = getattr(request, "vllm_xargs", None)
        for key in LAYOUT_ARGS:
            if key in (xargs or ()):
                raise MarkupError(
                    "token offsets cannot be given for a chat, whose tokens the server makes; mark "
                    'content parts with "span": true, or use /v1/completions with token ids',
                    f"vllm_xargs.{key}",
                    "unsupported",
                )
        options = read_options(_extra(request, "spans"), xargs, self.block_size)
        documents = (
            getattr(request, "documents", None) if _has_field(request, "documents") else None
        )
        if not has_chat_markup(messages, documents, self.config.delimiter):
            if options:
                set_state(request, MarkupState(options))
            return None
        check_features(request, "messages")
        if has_non_text_content(messages):
            raise MarkupError(
                "spans beside images, audio or video are not supported", "messages", "unsupported"
            )
        markup = ChatMarkup(messages, documents, self.config.delimiter)
        set_state(request, MarkupState(options))
        return markup

    def _refuse_elsewhere(self, request: Any, messages: Sequence[Any]) -> None:
        """Refuse markup in requests that become chats on the way (/v1/responses and the like)."""
        if has_chat_markup(messages, None, self.config.delimiter):
            name = type(request).__name__
            place = "/v1/responses" if name == "ResponsesRequest" else f"the endpoint of a {name}"
            raise MarkupError(
                f"spans are not supported on {place}; use /v1/chat/completions",
                "input",
                "endpoint",
            )

    async def render_chat(
        self, markup: ChatMarkup, chat_params: ChatParams, tok_params: TokenizeParams
    ) -> tuple[list[Any], MarkedPrompt]:
        """Render, split and tokenise a chat with spans.

        Args:
            markup: The request's markup.
            chat_params: How to render.
            tok_params: How to tokenise.

        Returns:
            The conversation as vLLM parsed it, and the prompt.

        Raises:
            MarkupError: The template does not leave the spans whole, or the prompt is too long.
        """
        if markup.has_documents and not await self._renders_documents(markup, chat_params):
            markup.use_context_block()
        # A template may print the time; a second try then finds both renderings alike.
        for _ in range(2):
            sentinels = Sentinels()
            (conversation, plain), (_, marked) = await asyncio.gather(
                self._render(markup, chat_params, None),
                self._render(markup, chat_params, sentinels),
            )
            if sentinels.nonce not in plain and sentinels.strip(marked) == plain:
                break
        else:
            source = markup.sources[0]
            raise MarkupError(
                "the model's chat template looks into the text of spans and would render another "
                "prompt with them; send it unmarked",
                source.param,
                "template",
            )
        pieces = sentinels.split(marked, markup.sources)
        prompt = await self._lay_out(pieces, plain, tok_params)
        return conversation, prompt

    async def _renders_documents(self, markup: ChatMarkup, chat_params: ChatParams) -> bool:
        sentinels = Sentinels()
        _, marked = await self._render(markup, chat_params, sentinels)
        seen = sentinels.seen(marked)
        return any(index in seen for index in markup.document_spans)

    async def _render(
        self, markup: ChatMarkup, chat_params: ChatParams, sentinels: Sentinels | None
    ) -> tuple[list[Any], str]:
        kwargs = dict(chat_params.chat_template_kwargs)
        if (documents := markup.documents(sentinels)) is not None:
            kwargs["documents"] = documents
        elif markup.document_spans:
            # They are in the messages by now.
            kwargs.pop("documents", None)
        params = dataclasses.replace(chat_params, chat_template_kwargs=kwargs)
        conversation, prompt = await self.renderer.render_messages_async(
            markup.messages(sentinels),  # type: ignore[arg-type]
            params,
        )
        text = prompt.get("prompt")
        if not isinstance(text, str) or "prompt_token_ids" in prompt:
            raise MarkupError(
                "this model's tokenizer renders chats to tokens without their text, so spans cannot "
                "be found; use /v1/completions with token ids and vllm_xargs.span_starts",
                "messages",
                "unsupported",
            )
        return conversation, text

    # Completions

    async def mark_completion(self, request: Any, prompt_input: Any) -> list[Any] | None:
        """Find the markup of a completion request's prompts and lay them out.

        Args:
            request: A request that tokenises prompts or takes them as they are.
            prompt_input: Its prompt or prompts: texts or lists of token ids.

        Returns:
            The prompts for vLLM, those with spans as tokens; ``None`` when none has markup.

        Raises:
            MarkupError: Markup or options that cannot be served.
        """
        if (sampling_params := getattr(request, "sampling_params", None)) is not None:
            # Token-in-token-out: the client made the engine's own parameters.
            self.check_generate(sampling_params.extra_args, prompt_input)
            return None
        prompts = [] if prompt_input is None else list(prompt_to_seq(prompt_input))
        marked = await self._mark_prompts(request, prompts)
        if marked is None:
            return None
        return [
            plain
            if found is None or found.text is None
            else {"prompt_token_ids": list(found.token_ids), "prompt": found.text}
            for plain, found in zip(prompts, marked, strict=True)
        ]

    async def _mark_prompts(
        self, request: Any, prompts: Sequence[Any]
    ) -> list[MarkedPrompt | None] | None:
        xargs = getattr(request, "vllm_xargs", None)
        options = read_options(_extra(request, "spans"), xargs, self.block_size)
        offsets = has_offsets(xargs)
        if offsets and (len(prompts) != 1 or getattr(request, "prompt_embeds", None) is not None):
            raise MarkupError(
                "token offsets are for a request with one prompt",
                "vllm_xargs.span_starts",
                "unsupported",
            )
        if offsets and isinstance(prompts[0], str):
            raise MarkupError(
                "token offsets need a prompt of token ids; this one is text",
                "vllm_xargs.span_starts",
                "unsupported",
            )
        if not offsets and not any(self._is_marked(prompt) for prompt in prompts):
            if options:
                set_state(request, MarkupState(options))
            return None
        tok_params = request.build_tok_params(self.renderer.model_config)
        marked: list[MarkedPrompt | None] = []
        for index, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            if offsets:
                marked.append(
                    from_offsets(
                        prompt,
                        xargs or {},
                        block_size=self.block_size,
                        max_spans=self.config.max_spans,
                    )
                )
            elif not self._is_marked(prompt):
                marked.append(None)
            elif isinstance(prompt, str):
                marked.append(await self._mark_text(prompt, param, tok_params))
            else:
                marked.append(self._mark_tokens(prompt, param))
        if not any(marked):
            return None
        check_features(request, "prompt")
        set_state(request, MarkupState(options, marked))
        return marked

    def check_generate(
        self, extra_args: Mapping[str, Any] | None, token_ids: Sequence[int]
    ) -> None:
        """Check a layout that reaches the engine without passing a front end of ours.

        Raises:
            MarkupError: A layout or option that the engine would refuse.
        """
        read_options(None, extra_args, self.block_size)
        if has_offsets(extra_args):
            from_offsets(
                token_ids,
                extra_args or {},
                block_size=self.block_size,
                max_spans=self.config.max_spans,
                where="sampling_params.extra_args",
            )

    def _is_marked(self, prompt: Any) -> bool:
        if isinstance(prompt, str):
            return bool(self.config.delimiter) and self.config.delimiter in prompt  # type: ignore[operator]
        if self.config.token_plus is None or not isinstance(prompt, (list, tuple)):
            return False
        return any(token == self.config.token_plus for token in prompt[:: self.block_size])

    async def _mark_text(
        self, prompt: str, param: str, tok_params: TokenizeParams
    ) -> MarkedPrompt | None:
        pieces = split_delimited(prompt, self.config.delimiter or "", param)
        if not any(piece.is_span for piece in pieces):
            raise MarkupError("the delimiters have no text between them", param, "empty_span")
        return await self._lay_out(pieces, "".join(piece.text for piece in pieces), tok_params)

    def _mark_tokens(self, prompt: Sequence[int], param: str) -> MarkedPrompt | None:
        assert self.config.token_plus is not None
        return from_markers(
            prompt,
            token_plus=self.config.token_plus,
            token_cross=self.config.token_cross,
            block_size=self.block_size,
            max_spans=self.config.max_spans,
            param=param,
        )

    # Both

    async def _lay_out(
        self, pieces: list[TextPiece], text: str, tok_params: TokenizeParams
    ) -> MarkedPrompt:
        # Stock's guard against tokenising a text that cannot fit in any case.
        tok_params.apply_pre_tokenization(self.renderer.tokenizer, {"prompt": text})
        encoder = self.encoder
        special = tok_params.add_special_tokens

        def work() -> MarkedPrompt:
            return assemble(
                pieces,
                encoder.encode,
                block_size=self.block_size,
                pad_id=encoder.pad_id,
                max_spans=self.config.max_spans,
                head=encoder.head if special else (),
                tail=encoder.tail if special else (),
            )

        prompt = await asyncio.get_running_loop().run_in_executor(self.renderer._executor, work)
        limit = tok_params.max_input_tokens
        if limit is not None and len(prompt.token_ids) > limit:
            raise MarkupError(
                f"the prompt has {len(prompt.token_ids)} tokens, {prompt.pad_tokens} of them pads that "
                f"fill {len(prompt.span_starts)} spans up to blocks of {self.block_size}; this "
                f"model's maximum context length is {limit} tokens",
                "input_tokens",
                "too_long",
            )
        return prompt


class SpanChatRenderer:
    """vLLM's renderer for one chat request with spans.

    It stands in for the renderer inside vLLM's own preprocessing, so that all else which that does
    stays vLLM's; whatever is not about the prompt's tokens goes to the renderer itself.
    """

    def __init__(self, spans: SpanMarkup, markup: ChatMarkup, state: MarkupState) -> None:
        self._spans = spans
        self._markup = markup
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spans.renderer, name)

    async def render_chat_async(
        self,
        conversations: Sequence[Any],
        chat_params: ChatParams,
        tok_params: TokenizeParams | None = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
        skip_mm_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Stand-in for ``BaseRenderer.render_chat_async``; the markup holds the one conversation."""
        del conversations
        arrival_time = time.time()
        renderer = self._spans.renderer
        if tok_params is None:
            tok_params = renderer.default_chat_tok_params
        conversation, prompt = await self._spans.render_chat(self._markup, chat_params, tok_params)
        self._state.prompts = [prompt]
        tokens: Any = {"prompt_token_ids": list(prompt.token_ids), "prompt": prompt.text}
        tokens = tok_params.apply_post_tokenization(renderer.tokenizer, tokens)
        renderer._apply_prompt_extras(
            [tokens],
            {**(prompt_extras or {}), "media_io_kwargs": chat_params.media_io_kwargs or {}},
        )
        engine_input = await renderer.process_for_engine_async(
            tokens, arrival_time, skip_mm_cache=skip_mm_cache, tok_params=tok_params
        )
        return [conversation], [engine_input]


class SpanOnlineRenderer:
    """vLLM's ``OnlineRenderer`` with another renderer, for one request."""

    def __init__(self, online_renderer: Any, renderer: SpanChatRenderer) -> None:
        self._online_renderer = online_renderer
        self.renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._online_renderer, name)


def check_features(request: Any, param: str) -> None:
    """Refuse what does not go together with spans.

    Args:
        request: The request.
        param: Names the prompt in errors.

    Raises:
        MarkupError: The request uses such a feature.
    """
    echo = bool(getattr(request, "echo", False))
    # What a completion calls `logprobs` is `top_logprobs` in a chat, 0 by default.
    logprobs = getattr(request, "logprobs" if param == "prompt" else "top_logprobs", None)
    unsupported = {
        "prompt_logprobs": getattr(request, "prompt_logprobs", None) is not None,
        "echo": echo and logprobs is not None,
        "use_beam_search": bool(getattr(request, "use_beam_search", False)),
        "suffix": getattr(request, "suffix", None) is not None,
        "prompt_embeds": getattr(request, "prompt_embeds", None) is not None,
        "truncate_prompt_tokens": getattr(request, "truncate_prompt_tokens", None) is not None,
        "return_token_offsets": bool(getattr(request, "return_token_offsets", False)),
        "kv_transfer_params.prompt_token_ids": bool(
            (getattr(request, "kv_transfer_params", None) or {}).get("prompt_token_ids")
        ),
    }
    why = {
        "prompt_logprobs": "the tokens of a reused span have no logits",
        "echo": "echo asks for the prompt's logprobs, and the tokens of a reused span have no logits",
        "truncate_prompt_tokens": "a cut would tear spans",
    }
    for name, is_used in unsupported.items():
        if is_used:
            reason = f": {why[name]}" if name in why else ""
            raise MarkupError(
                f"{name} cannot be used with spans{reason}",
                name,
                name if name in ("prompt_logprobs", "echo") else "unsupported",
            )


def _has_field(request: Any, name: str) -> bool:
    return name in getattr(type(request), "model_fields", {})


def _extra(request: Any, name: str) -> Any:
    """A field of the body that vLLM's model does not know (pydantic keeps it)."""
    return (getattr(request, "__pydantic_extra__", None) or {}).get(name)
