"""What the scheduler knows of one request with spans: read once from its sampling parameters, then kept on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_spans.config import SpansConfig
from vllm_spans.core.hashing import RequestKeys, SpanKeyMemo, make_span_root
from vllm_spans.core.layout import (
    SPAN_GAP_LENGTH,
    SPAN_GAP_POLICY,
    SPAN_PAD_TOKENS,
    SpanLayout,
    SpanLayoutError,
)
from vllm_spans.core.plan import ReusePlan, Segment
from vllm_spans.core.policy import GAP_POLICIES, GapPolicy, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request


@dataclass
class RequestSpans:
    """Spans of one live request.

    Attributes:
        layout: Where its spans are.
        policy: Its gap policy.
        prompt_tokens: Tokens of its prompt, for the counters.
        pad_tokens: Pad tokens among them, for the counters.
        keys: Its block keys; ``None`` under policy ``full``, whose keys are vLLM's own.
        plan: Plan of the present admission; ``None`` while the request waits.
        todo: Segments not yet finished, the next one last.
        offset: First token of the next segment that is still to be computed.
        heads: Isolated KV under a gap, while the span it belongs to is being computed: offset in the span in
            blocks -> block outside the request's table.
        load_job: Job that fills the plan's blocks from another tier, while it runs; no row runs before its end.
        loaded_tokens: Span tokens past a gap that the plan takes from other tiers, by tier.
        counted: Whether the counters have seen the request; a re-plan is not counted again.
    """

    layout: SpanLayout
    policy: GapPolicy
    prompt_tokens: int
    pad_tokens: int
    keys: RequestKeys | None = None
    plan: ReusePlan | None = None
    todo: list[Segment] = field(default_factory=list)
    offset: int = 0
    open_span: int | None = None
    heads: dict[int, KVCacheBlock] = field(default_factory=dict)
    load_job: int | None = None
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    counted: bool = False

    @property
    def loaded(self) -> bool:
        """Whether all that the plan takes from other tiers is there."""
        return self.load_job is None

    @property
    def prepared(self) -> bool:
        """Whether the request itself may continue."""
        return self.loaded and not self.todo


def read_spans(
    extra_args: Mapping[str, Any] | None,
    num_prompt_tokens: int,
    block_size: int,
    config: SpansConfig,
) -> RequestSpans | None:
    """Read and check the span arguments of a request.

    Args:
        extra_args: ``SamplingParams.extra_args``.
        num_prompt_tokens: Tokens of the prompt.
        block_size: Tokens per block.
        config: Defaults of the engine, resolved.

    Returns:
        ``None`` for a request without spans.

    Raises:
        SpanLayoutError: Something in the arguments cannot be served.
    """
    layout = SpanLayout.from_extra_args(extra_args, num_prompt_tokens, block_size)
    if layout is None or extra_args is None:
        return None
    if len(layout.spans) > config.max_spans:
        raise SpanLayoutError(
            f"{len(layout.spans)} spans are more than the {config.max_spans} that one request may have "
            "(VLLM_V1_SPANS_MAX_SPANS)",
            "span_starts",
        )
    name = extra_args.get(SPAN_GAP_POLICY, config.gap_policy)
    if name not in GAP_POLICIES:
        raise SpanLayoutError(
            f"gap policy {name!r} is not known; use one of {', '.join(GAP_POLICIES)}",
            SPAN_GAP_POLICY,
        )
    length = extra_args.get(SPAN_GAP_LENGTH, config.gap_length)
    if type(length) is not int or length <= 0 or length % block_size:
        raise SpanLayoutError(
            f"gap length {length!r} must be a positive multiple of the block size {block_size}",
            SPAN_GAP_LENGTH,
        )
    pads = extra_args.get(SPAN_PAD_TOKENS, 0)
    if type(pads) is not int or not 0 <= pads <= num_prompt_tokens:
        raise SpanLayoutError(
            f"{SPAN_PAD_TOKENS} = {pads!r} must be between 0 and {num_prompt_tokens}",
            SPAN_PAD_TOKENS,
        )
    return RequestSpans(layout, make_policy(name, length), num_prompt_tokens, pads)


class SpanHasher:
    """Block hasher of the engine: the two chains for a request with spans, vLLM's own for all others.

    Args:
        stock: vLLM's hasher (``get_request_block_hasher``).
        block_size: Tokens per block.
        hash_fn: Hash function behind ``stock``.
        config: Settings of the engine, resolved.
        model: Fingerprint of model and RoPE geometry, part of every span root.
    """

    def __init__(
        self,
        stock: Callable[[Request], list[BlockHash]],
        block_size: int,
        hash_fn: Callable[[Any], bytes],
        config: SpansConfig,
        model: str,
    ) -> None:
        self._stock = stock
        self._block_size = block_size
        self._hash_fn = hash_fn
        self._config = config
        self._model = model
        self._memo = SpanKeyMemo(hash_fn, block_size)

    def __call__(self, request: Request) -> list[BlockHash]:
        """Keys of the request's full blocks that have none yet."""
        # vLLM asks after every token; most complete no block.
        if request.num_tokens < (len(request.block_hashes) + 1) * self._block_size:
            return []
        spans = self.spans_of(request)
        if spans is None or spans.keys is None:
            return self._stock(request)
        return spans.keys.extend(request._all_token_ids, _extra_keys(request))  # type: ignore[return-value]

    def spans_of(self, request: Request) -> RequestSpans | None:
        """Spans of a request; read at its first block, attached to it from then on."""
        try:
            return request.vllm_spans  # type: ignore[attr-defined]
        except AttributeError:
            pass
        params = request.sampling_params
        spans = None
        if params is not None and params.extra_args:
            spans = read_spans(
                params.extra_args, request.num_prompt_tokens, self._block_size, self._config
            )
        if spans is not None and not spans.policy.is_full:
            spans.keys = self._make_keys(request, spans)
        request.vllm_spans = spans  # type: ignore[attr-defined]
        return spans

    def _make_keys(self, request: Request, spans: RequestSpans) -> RequestKeys:
        from vllm.v1.core import kv_cache_utils

        tenant = _extra_keys(request)(0, self._block_size)
        root = make_span_root(self._hash_fn, tenant, self._model)
        return RequestKeys(
            spans.layout,
            spans.policy,
            self._block_size,
            self._hash_fn,
            kv_cache_utils.NONE_HASH,
            root,
            self._memo,
        )


def _extra_keys(request: Request) -> Callable[[int, int], tuple[Any, ...] | None]:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    return lambda start, end: generate_block_hash_extra_keys(request, start, end, 0)[0]
