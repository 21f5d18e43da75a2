"""Per-request options: the body's ``spans`` object and the ``span_*`` keys of ``vllm_xargs``; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_spans.core.layout import (
    CROSS_SPAN_STARTS,
    SPAN_ARGS,
    SPAN_GAP_LENGTH,
    SPAN_GAP_POLICY,
    SPAN_PAD_TOKENS,
    SPAN_STARTS,
)
from vllm_spans.core.policy import GAP_POLICIES
from vllm_spans.markup.errors import MarkupError

_OPTIONS = {"gap_policy": SPAN_GAP_POLICY, "gap_length": SPAN_GAP_LENGTH}
LAYOUT_ARGS = (SPAN_STARTS, CROSS_SPAN_STARTS, SPAN_PAD_TOKENS)


def read_options(spans: object, xargs: Mapping[str, Any] | None, block_size: int) -> dict[str, Any]:
    """Check the per-request options and bring them into one form.

    Args:
        spans: The ``spans`` object of the request's body, ``None`` when absent.
        xargs: The request's ``vllm_xargs``.
        block_size: Tokens per KV block.

    Returns:
        ``span_gap_policy`` and ``span_gap_length``, where given, for ``SamplingParams.extra_args``.

    Raises:
        MarkupError: An unknown option, a value that cannot be used, or one option given twice.
    """
    found: dict[str, Any] = {}
    for key in xargs or ():
        if not key.startswith(("span_", "cross_span_")):
            continue
        param = f"vllm_xargs.{key}"
        if key not in SPAN_ARGS:
            raise MarkupError(
                f"{key} is not known. Known: {', '.join(SPAN_ARGS)}", param, "unknown_option"
            )
        if key not in LAYOUT_ARGS:
            found[key] = _checked(key, (xargs or {})[key], param, block_size)
    if spans is None:
        return found
    if not isinstance(spans, Mapping):
        raise MarkupError(
            f"spans must be an object of options, not {type(spans).__name__}", "spans", "bad_option"
        )
    for name, value in spans.items():
        param = f"spans.{name}"
        if name not in _OPTIONS:
            raise MarkupError(
                f"the option {name!r} is not known. Known: {', '.join(_OPTIONS)}",
                param,
                "unknown_option",
            )
        key = _OPTIONS[name]
        if value is None:
            continue
        checked = _checked(key, value, param, block_size)
        if found.get(key, checked) != checked:
            raise MarkupError(f"differs from vllm_xargs.{key}", param, "bad_option")
        found[key] = checked
    return found


def _checked(key: str, value: object, param: str, block_size: int) -> Any:
    if key == SPAN_GAP_POLICY:
        if value not in GAP_POLICIES:
            raise MarkupError(
                f"{value!r} is no gap policy. Use one of {', '.join(GAP_POLICIES)}",
                param,
                "bad_option",
            )
        return value
    if type(value) is not int or value <= 0 or value % block_size:
        raise MarkupError(
            f"{value!r} must be a positive multiple of the block size {block_size}; for no gaps use "
            "the gap policy 'none'",
            param,
            "bad_option",
        )
    return value
