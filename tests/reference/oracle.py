"""Segmented-span prefill in plain transformers; it shares no code with the engine.

The definition: a plus span's KV is that of the span computed alone from position 0, its keys moved
to their place by rotation; the first ``k`` tokens of each span are computed again in context; the
prefix and the cross segments see everything before them in its final state. A sliding window counts
positions of the sequence that is computed: of the prompt in context, of the span when it is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

LayerKV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Segment:
    """A token range of the prompt: ``context`` sees all before it, ``body`` was computed alone."""

    kind: str
    start: int
    end: int
    span_start: int = 0


def plus_spans(
    num_tokens: int, span_starts: Sequence[int], cross_span_starts: Sequence[int], block_size: int
) -> list[tuple[int, int]]:
    """Plus spans as half-open ranges; the block of the last token never belongs to one.

    Args:
        num_tokens: Prompt length.
        span_starts: Start of each plus span.
        cross_span_starts: Start of each cross segment that follows a plus span.
        block_size: KV block size in tokens.

    Returns:
        The spans that are not empty, in order.
    """
    limit = (num_tokens - 1) // block_size * block_size
    marks = sorted({*span_starts, *cross_span_starts, num_tokens})
    spans = []
    for start in span_starts:
        end = min(marks[marks.index(start) + 1], limit)
        if end > start:
            spans.append((start, end))
    return spans


def segments(
    num_tokens: int,
    span_starts: Sequence[int] = (),
    cross_span_starts: Sequence[int] = (),
    policy: str = "legolink",
    gap_length: int = 32,
    block_size: int = 32,
) -> list[Segment]:
    """The prompt as an ordered list of segments under a gap policy.

    Args:
        num_tokens: Prompt length.
        span_starts: Start of each plus span.
        cross_span_starts: Start of each cross segment that follows a plus span.
        policy: ``none``, ``legolink`` or ``full``.
        gap_length: Gap tokens per span under ``legolink``.
        block_size: KV block size in tokens.

    Returns:
        Segments that cover ``[0, num_tokens)`` without overlap.

    Raises:
        ValueError: For an unknown policy.
    """
    if policy not in ("none", "legolink", "full"):
        raise ValueError(f"unknown gap policy {policy!r}")
    spans = plus_spans(num_tokens, span_starts, cross_span_starts, block_size)
    if policy == "full":
        spans = []
    result: list[Segment] = []
    position = 0
    for start, end in spans:
        if start > position:
            result.append(Segment("context", position, start))
        gap = gap_length if policy == "legolink" and start > 0 else 0
        gap_end = min(start + gap, end)
        if gap_end > start:
            result.append(Segment("context", start, gap_end))
        if end > gap_end:
            result.append(Segment("body", gap_end, end, span_start=start))
        position = end
    if num_tokens > position:
        result.append(Segment("context", position, num_tokens))
    return result


def _drop_rotation(model: Any) -> None:
    """Take RoPE from the layers whose ``layer_rope_theta`` is 0, which transformers does not know."""

    def without(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = kwargs["position_embeddings"]
        return args, {
            **kwargs,
            "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin)),
        }

    thetas = getattr(model.config, "layer_rope_theta", None) or []
    for layer, theta in zip(model.get_decoder().layers, thetas, strict=False):
        if theta == 0:
            layer.self_attn.register_forward_pre_hook(without, with_kwargs=True)


def _widen_window(model: Any) -> None:
    """Give Cohere 2 the window that vLLM gives it: a token and ``sliding_window`` tokens before it.

    In transformers the token itself is one of the ``sliding_window``.
    """
    if model.config.model_type == "cohere2":
        model.config.sliding_window += 1


class Oracle:
    """A transformers model that prefills by segments and scores continuations.

    Args:
        model: A model folder, or a loaded causal LM.
        block_size: KV block size of the engine it is compared with.
        interleaved: Whether rotary pairs are neighbours (GPT-J style), not halves (NeoX style).
    """

    def __init__(self, model: Any, block_size: int = 32, interleaved: bool = False) -> None:
        if isinstance(model, str):
            # The other implementations leave softcaps and sinks out.
            model = AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float32, attn_implementation="eager"
            )
        self.model = model.float().eval()
        _drop_rotation(self.model)
        _widen_window(self.model)
        self.block_size = block_size
        self.interleaved = interleaved
        self._alone: dict[tuple[int, ...], list[LayerKV]] = {}
        self._rotary_layers: list[bool] | None = None

    # -- model access -------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self, tokens: Sequence[int], first_position: int = 0, past: list[LayerKV] | None = None
    ) -> tuple[torch.Tensor, list[LayerKV]]:
        """Run ``tokens`` after ``past``.

        Returns:
            Log-probabilities of every row, and the KV of every layer, ``past`` included.
        """
        # Told no configuration, it keeps all keys; the model masks them by window.
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past or []):
            cache.update(key, value, layer)
        ids = torch.tensor([list(tokens)])
        positions = torch.arange(first_position, first_position + len(tokens))[None]
        output = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        )
        kv = [(layer.keys, layer.values) for layer in cache.layers]
        return torch.log_softmax(output.logits[0].double(), dim=-1), kv

    def alone(self, tokens: Sequence[int]) -> list[LayerKV]:
        """KV of ``tokens`` computed with nothing before them, positions from 0."""
        key = tuple(tokens)
        if key not in self._alone:
            if len(self._alone) > 256:
                self._alone.clear()
            self._alone[key] = self.forward(tokens)[1]
        return self._alone[key]

    # -- rotation -----------------------------------------------------------------------------

    def rotary_layers(self) -> list[bool]:
        """Which layers rotate: a layer without RoPE has the same keys at any position."""
        if self._rotary_layers is None:
            probe = [5, 9, 7, 11, 6, 8, 10, 4]
            here, there = self.forward(probe)[1], self.forward(probe, 97)[1]
            self._rotary_layers = [
                bool((a - b).abs().max() > 1e-3 * a.abs().max())
                for (a, _), (b, _) in zip(here, there, strict=True)
            ]
        return self._rotary_layers

    def _cos_sin(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tables of each layer; a model may rotate layers with a window by another base."""
        rotary = self.model.get_decoder().rotary_emb
        count = len(self.rotary_layers())
        kinds = self.model.config.layer_types if hasattr(rotary, "layer_types") else [None] * count
        tables = {}
        for kind in set(kinds):
            which = {} if kind is None else {"layer_type": kind}
            cos, sin = (
                t[0].double() for t in rotary(torch.zeros(1, 1, 1), positions[None], **which)
            )
            if self.model.config.model_type == "gpt_oss":
                # Its tables are of one half.
                cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
            tables[kind] = (cos, sin)
        return [tables[kind] for kind in kinds]

    def _rotate(
        self, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
    ) -> torch.Tensor:
        dim = cos.shape[-1]
        turned, passed = key[..., :dim].double(), key[..., dim:]
        if self.interleaved:
            # Some models keep their tables in half order and repeat them themselves.
            if not torch.equal(cos[..., 0::2], cos[..., 1::2]):
                cos = cos[..., : dim // 2].repeat_interleave(2, dim=-1)
                sin = sin[..., : dim // 2].repeat_interleave(2, dim=-1)
            swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            swapped = torch.cat((-second, first), dim=-1)
        if inverse:
            # Scaled RoPE multiplies both tables by a magnitude, which the inverse divides out.
            turned = (turned * cos - swapped * sin) / (cos * cos + sin * sin)
        else:
            turned = turned * cos + swapped * sin
        return torch.cat((turned.to(key.dtype), passed), dim=-1)

    def move(self, kv: list[LayerKV], source: int, target: int) -> list[LayerKV]:
        """Move KV computed at positions from ``source`` to positions from ``target``.

        Args:
            kv: KV of each layer, one entry per token.
            source: Position of the first token where it was computed.
            target: Position of the first token where it goes.

        Returns:
            The KV with every rotated key un-rotated and rotated again, in float64.
        """
        steps = torch.arange(kv[0][0].shape[-2])
        before, after = self._cos_sin(steps + source), self._cos_sin(steps + target)
        moved = []
        layers = zip(kv, self.rotary_layers(), before, after, strict=True)
        for (key, value), rotary, source_table, target_table in layers:
            if rotary:
                key = self._rotate(key, *source_table, inverse=True)
                key = self._rotate(key, *target_table, inverse=False)
            moved.append((key, value))
        return moved

    # -- the definition -----------------------------------------------------------------------

    def prefill(
        self, tokens: Sequence[int], keep_last: bool = False, **layout: Any
    ) -> tuple[torch.Tensor, list[LayerKV]]:
        """Prefill a prompt segment by segment.

        Args:
            tokens: The prompt.
            keep_last: Leave the last token out of the KV and of the result (the caller runs it).
            **layout: ``span_starts``, ``cross_span_starts``, ``policy``, ``gap_length``.

        Returns:
            Log-probabilities of the last segment's rows, and the final KV.
        """
        plan = segments(len(tokens), block_size=self.block_size, **layout)
        state: list[LayerKV] | None = None
        logprobs = torch.empty(0)
        for segment in plan:
            end = segment.end - (keep_last and segment.end == len(tokens))
            piece = tokens[segment.start : end]
            if not piece:
                continue
            if segment.kind == "context":
                logprobs, state = self.forward(piece, segment.start, state)
                continue
            span_end = next(
                e
                for s, e in plus_spans(
                    len(tokens),
                    layout.get("span_starts", ()),
                    layout.get("cross_span_starts", ()),
                    self.block_size,
                )
                if s == segment.span_start
            )
            span = self.alone(tokens[segment.span_start : span_end])
            skip = segment.start - segment.span_start
            body = [(key[..., skip:, :], value[..., skip:, :]) for key, value in span]
            body = self.move(body, skip, segment.start)
            if state is None:
                state = body
            else:
                state = [
                    (torch.cat((k0, k1), dim=-2), torch.cat((v0, v1), dim=-2))
                    for (k0, v0), (k1, v1) in zip(state, body, strict=True)
                ]
        assert state is not None
        return logprobs, state

    def score(
        self, tokens: Sequence[int], continuation: Sequence[int], **layout: Any
    ) -> torch.Tensor:
        """Log-probabilities at every step of a given continuation (teacher-forced).

        Args:
            tokens: The prompt.
            continuation: The tokens some engine answered.
            **layout: As in :meth:`prefill`.

        Returns:
            A ``[len(continuation), vocabulary]`` tensor; row ``i`` predicts ``continuation[i]``.
        """
        _, state = self.prefill(tokens, keep_last=True, **layout)
        rows = [tokens[-1], *continuation[:-1]]
        logprobs, _ = self.forward(rows, len(tokens) - 1, state)
        return logprobs

    def greedy(
        self, tokens: Sequence[int], count: int, **layout: Any
    ) -> tuple[list[int], list[float]]:
        """Greedy continuation of ``count`` tokens and the log-probability of each."""
        logprobs, state = self.prefill(tokens, **layout)
        answer: list[int] = []
        chosen: list[float] = []
        row = logprobs[-1]
        while True:
            answer.append(int(row.argmax()))
            chosen.append(float(row.max()))
            if len(answer) == count:
                return answer, chosen
            logprobs, state = self.forward([answer[-1]], len(tokens) + len(answer) - 1, state)
            row = logprobs[-1]
