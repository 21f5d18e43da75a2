"""What the markup of a request comes to, as ``POST /v1/spans/explain`` answers it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.pieces import MarkedPrompt

logger = logging.getLogger(__name__)

PREVIEW_CHARACTERS = 60


def request_kind(body: Any) -> str:
    """Whether a body is a chat or a completion.

    Raises:
        MarkupError: It is neither.
    """
    if isinstance(body, dict):
        if "messages" in body:
            return "chat"
        if "prompt" in body:
            return "completion"
    raise MarkupError(
        "send the body of a chat completion (messages) or of a completion (prompt)",
        "messages",
        "bad_option",
    )


def describe(
    prompt: MarkedPrompt | None,
    token_ids: Sequence[int],
    *,
    model: str | None,
    block_size: int,
    gap_policy: str,
    gap_length: int,
    decode: Callable[[Sequence[int]], str],
    cached: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Describe a prompt.

    Args:
        prompt: The prompt's layout, ``None`` without spans.
        token_ids: Its tokens.
        model: The model's name.
        block_size: Tokens per KV block.
        gap_policy: The policy in force for the request.
        gap_length: Its k.
        decode: Text of tokens.
        cached: The engine's answer: pieces with ``start``, ``cached_tokens`` and ``tier_tokens``, the names of
            its tiers, and the size of its KV cache; ``None`` when there is no engine.

    Returns:
        The answer as plain JSON values. ``cached_tokens`` and ``tier_tokens`` of a piece, ``tiers``, and the
        cache's size, are ``None`` if unknown.
    """
    known = {piece["start"]: piece for piece in (cached or {}).get("pieces", ())}
    tiers = (cached or {}).get("tiers")
    pieces = []
    laid = prompt.pieces if prompt is not None else ()
    rows: list[tuple[str, int, int, int, str | None]] = [
        (piece.kind, piece.start, piece.end, piece.pads, piece.text) for piece in laid
    ]
    if not rows:
        rows = [("prefix", 0, len(token_ids), 0, None)]
    for kind, start, end, pads, text in rows:
        # A piece that the engine cuts in two (the last block is always computed) has two parts.
        parts = [part for offset, part in known.items() if start <= offset < end]
        pieces.append(
            {
                "kind": kind,
                "start": start,
                "end": end,
                "tokens": end - start,
                "pads": pads,
                "cached_tokens": sum(part["cached_tokens"] for part in parts) if parts else None,
                "tier_tokens": (
                    {
                        tier: sum(part["tier_tokens"].get(tier, 0) for part in parts)
                        for tier in tiers or ()
                    }
                    if parts
                    else None
                ),
                "text": _preview(decode(token_ids[start : end - pads]) if text is None else text),
            }
        )
    return {
        "object": "spans.explanation",
        "model": model,
        "block_size": block_size,
        "gap_policy": gap_policy,
        "gap_length": gap_length,
        "prompt_tokens": len(token_ids),
        "span_pad_tokens": prompt.pad_tokens if prompt is not None else 0,
        "spans": sum(piece["kind"] == "plus" for piece in pieces),
        "kv_bytes_per_token": (cached or {}).get("kv_bytes_per_token"),
        "kv_cache_tokens": (cached or {}).get("kv_cache_tokens"),
        "tiers": tiers,
        "pieces": pieces,
    }


def _preview(text: str) -> str:
    if len(text) <= PREVIEW_CHARACTERS:
        return text
    return text[: PREVIEW_CHARACTERS - 1] + "…"
