"""HTTP routes of the markup, added to vLLM's application."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from vllm_spans.core.layout import SPAN_GAP_LENGTH, SPAN_GAP_POLICY
from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.explain import describe, request_kind
from vllm_spans.markup.refusal import App, RefuseSpans
from vllm_spans.markup.rendering import SpanMarkup, refuse
from vllm_spans.markup.state import MarkupState, get_state

logger = logging.getLogger(__name__)

router = APIRouter()


def attach(app: FastAPI) -> None:
    """Add the explain endpoint and the refusal of spans where they are not supported."""
    app.include_router(router)

    def respond(error: MarkupError) -> App:
        response = create_error_response(refuse(error, app.state.vllm_config))
        return JSONResponse(response.model_dump(), status_code=response.error.code)

    app.add_middleware(RefuseSpans, respond=respond)


@router.post("/v1/spans/explain")
async def explain(raw_request: Request) -> JSONResponse:
    """Show pieces, spans, pads and cache state of a chat or completion body; generates nothing."""
    try:
        body = await raw_request.json()
    except (ValueError, RecursionError) as error:
        raise VLLMValidationError(f"the body is not JSON that can be read: {error}") from error
    try:
        kind = request_kind(body)
    except MarkupError as error:
        raise refuse(error, raw_request.app.state.vllm_config) from error
    try:
        request: Any = (
            ChatCompletionRequest.model_validate(body)
            if kind == "chat"
            else CompletionRequest.model_validate(body)
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = str(first["loc"][0]) if first["loc"] else None
        raise VLLMValidationError(first["msg"], parameter=place) from error

    state = raw_request.app.state
    serving = state.openai_serving_chat if kind == "chat" else state.openai_serving_completion
    if serving is None:
        raise VLLMValidationError("the model does not generate text, so it has no spans")
    if kind == "chat":
        rendered = await serving.render_chat_request(request)
    else:
        rendered = await serving.render_completion_request(request)
    if isinstance(rendered, ErrorResponse):
        return JSONResponse(rendered.model_dump(), status_code=rendered.error.code)
    engine_inputs = rendered[1] if kind == "chat" else rendered
    if len(engine_inputs) != 1:
        many = MarkupError("explain takes one prompt", "prompt", "unsupported")
        raise refuse(many, state.vllm_config)

    markup = get_state(request) or MarkupState({})
    prompt = markup.prompts[0] if markup.prompts else None
    token_ids = list(engine_inputs[0].get("prompt_token_ids") or ())
    spans = SpanMarkup.of(serving.online_renderer.renderer)
    config = spans.config.resolve(spans.block_size)
    extra_args = {**markup.options, **(prompt.extra_args() if prompt is not None else {})}
    lora = serving._maybe_get_adapters(request)
    cached = await _ask_engine(
        state.engine_client,
        token_ids,
        extra_args,
        request.cache_salt,
        [lora.lora_name, lora.lora_path] if lora is not None else None,
    )
    answer = describe(
        prompt,
        token_ids,
        model=serving.models.model_name(lora),
        block_size=spans.block_size,
        gap_policy=extra_args.get(SPAN_GAP_POLICY, config.gap_policy),
        gap_length=extra_args.get(SPAN_GAP_LENGTH) or config.gap_length or 0,
        decode=spans.encoder.decode,
        cached=cached,
    )
    return JSONResponse(answer)


async def _ask_engine(engine_client: Any, *args: Any) -> dict[str, Any] | None:
    engine_core = getattr(engine_client, "engine_core", None)
    if engine_core is None:
        # A render-only server has no engine, and so no cache.
        return None
    answer = await engine_core.call_utility_async("spans_explain", *args)
    return answer if isinstance(answer, dict) else None
