"""What the markup of a request came to, kept with the request object.

The object itself carries it (not a context variable), so concurrent requests cannot mix and whoever
holds the request - sampling parameters, usage, explain - finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_spans.markup.pieces import MarkedPrompt

_ATTRIBUTE = "_vllm_spans_markup"


@dataclass(slots=True)
class MarkupState:
    """Markup of one request.

    Attributes:
        options: Per-request options for ``extra_args``.
        prompts: One entry per prompt of the request, ``None`` for a prompt without spans.
    """

    options: dict[str, Any]
    prompts: list[MarkedPrompt | None] = field(default_factory=list)
    _next: int = 0

    @property
    def has_spans(self) -> bool:
        """Whether any prompt has a span."""
        return any(prompt is not None for prompt in self.prompts)

    @property
    def pad_tokens(self) -> int:
        """Pads in all prompts."""
        return sum(prompt.pad_tokens for prompt in self.prompts if prompt is not None)

    def next_extra_args(self) -> dict[str, Any]:
        """``extra_args`` of the next prompt: vLLM builds sampling parameters prompt by prompt."""
        if not self.prompts:
            return dict(self.options)
        prompt = self.prompts[self._next % len(self.prompts)]
        self._next += 1
        return {**self.options, **(prompt.extra_args() if prompt is not None else {})}


def set_state(request: Any, state: MarkupState) -> None:
    """Keep the state with a request (a pydantic model, hence the bypass of its own setter)."""
    object.__setattr__(request, _ATTRIBUTE, state)


def get_state(request: Any) -> MarkupState | None:
    """The state of a request, ``None`` for a request without markup or options."""
    state = getattr(request, "__dict__", {}).get(_ATTRIBUTE)
    return state if isinstance(state, MarkupState) else None
