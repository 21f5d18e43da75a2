"""Attention of one layer on CUDA over un-rotated K: a stock kernel on scratch pages, a fused kernel for decode rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionImpl

from vllm_spans.attention.kernels.decode import decode_attention
from vllm_spans.attention.kernels.gather_rotate import gather_rotate
from vllm_spans.attention.kv_dtype import kernel_dtype

if TYPE_CHECKING:
    from vllm_spans.attention.cuda_metadata import SpansCudaMetadata
    from vllm_spans.attention.cuda_scratch import Scratch
    from vllm_spans.attention.kernels.decode import DecodeWorkspace
    from vllm_spans.attention.rotary import LayerRotary


@dataclass(frozen=True)
class _UnitScales:
    """Stands in for the layer towards the stock kernel: scratch pages are not quantised."""

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor


class SpansCudaAttentionImpl(AttentionImpl[Any]):
    """Attention over un-rotated K.

    Subclasses name the stock implementation that runs on the scratch cache.

    Attributes:
        layer_rotary: Set by ``install_query_rotary``; ``None`` for a layer without RoPE.
        scratch: Set by the worker, before the first step.
    """

    stock_impl_cls: ClassVar[type[AttentionImpl[Any]]]
    # Queries stay in the model's dtype: scores with fp8 K are computed from dequantised K.
    supports_quant_query_input: bool = False

    layer_rotary: LayerRotary | None = None
    scratch: Scratch | None = None
    _views: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    _unit_scales: _UnitScales | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        *args: Any,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Same arguments as the stock implementations."""
        if alibi_slopes is not None:
            raise NotImplementedError("spans do not handle ALiBi: its K depends on no rotation")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        self._softcap = float(logits_soft_cap or 0.0)
        self._kernel_dtype = kernel_dtype(kv_cache_dtype)
        if sinks is not None:
            kwargs["sinks"] = sinks
        self.stock = self.stock_impl_cls(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            None,
            sliding_window,
            "auto",
            logits_soft_cap,
            *args,
            **kwargs,
        )

    def get_impl_variants(self) -> tuple[Any, ...]:
        """What vLLM looks at for the windows that the stock kernel's schedule must know."""
        return (self, self.stock)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Let the stock implementation see loaded weights too."""
        self.stock.process_weights_after_loading(act_dtype)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K as the model gives it, not rotated, and V.

        Args:
            layer: Holds the scales of a quantised cache.
            key: ``[tokens, kv_heads, head_size]``, padding tokens included.
            value: Same shape.
            kv_cache: ``[blocks, kv_heads, block_size, 2 * head_size]``.
            slot_mapping: ``[tokens]`` without padding; negative for a token that is not stored.
        """
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        ops.reshape_and_cache_flash(
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpansCudaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Same arguments and shapes as the stock ``forward``; ``query`` is rotated, cached K is not.

        Raises:
            NotImplementedError: The output is to be quantised.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("spans do not fuse the quantisation of attention's output")
        decodes = attn_metadata.num_decodes
        if decodes:
            self.decode(
                layer,
                query[:decodes],
                kv_cache,
                attn_metadata.block_table[:decodes],
                attn_metadata.seq_lens[:decodes],
                output[:decodes],
                attn_metadata.workspace,
            )
        for prefill in attn_metadata.passes:
            scratch = self.scratch
            assert scratch is not None, "the worker allocates it before the first step"
            gather_rotate(
                *self._caches(kv_cache),
                prefill.block_table,
                *prefill.groups,
                prefill.max_blocks,
                scratch.key,
                scratch.value,
                *self._rotation(),
                *self._kv_scales(layer),
            )
            tokens = prefill.tokens
            self.stock.forward(
                self._scales(query.device),  # type: ignore[arg-type]
                query[tokens],
                key[tokens],
                value[tokens],
                scratch.pages,
                prefill.stock,
                output[tokens],
            )
        return output

    def decode(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        output: torch.Tensor,
        workspace: DecodeWorkspace,
    ) -> None:
        """Attention of rows of one token.

        Args:
            layer: Holds the scales of a quantised cache.
            query: ``[rows, heads, head_size]``, rotated.
            kv_cache: As in ``forward``.
            block_table: ``[rows, columns]``, int32.
            seq_lens: ``[rows]``, int32; 0 for a row without tokens.
            output: Like ``query``.
            workspace: Shared by all layers.
        """
        k_scale, v_scale = self._kv_scales(layer)
        decode_attention(
            query,
            *self._caches(kv_cache),
            block_table,
            seq_lens,
            *self._rotation(),
            self.scale,
            output,
            workspace,
            window_left=self._window_left,
            softcap=self._softcap,
            sinks=self.sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    @property
    def decode_kind(self) -> tuple[Any, ...]:
        """Layers of equal kinds run the same compiled decode kernel."""
        table, is_neox = self._rotation()
        rotary_dim = None if table is None else table.shape[1]
        return self._window_left, self._softcap > 0, self.sinks is not None, rotary_dim, is_neox

    def _rotation(self) -> tuple[torch.Tensor | None, bool]:
        """``cos_sin_cache`` and whether pairs are halves."""
        rotary = self.layer_rotary
        return (None, True) if rotary is None else (rotary.cos_sin_cache, rotary.is_neox)

    def _kv_scales(self, layer: Any) -> tuple[float, float]:
        if self._kernel_dtype is None:
            return 1.0, 1.0
        return layer._k_scale_float, layer._v_scale_float

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the layer, ``[blocks, block_size, kv_heads, head_size]`` each."""
        if self._views is None or self._views[0] is not kv_cache:
            # Kept: a view costs the host more than a kernel launch, and a step has one per layer.
            typed = kv_cache if self._kernel_dtype is None else kv_cache.view(self._kernel_dtype)
            key_cache, value_cache = typed.transpose(1, 2).split(self.head_size, dim=-1)
            self._views = (kv_cache, key_cache, value_cache)
        return self._views[1:]

    def _scales(self, device: torch.device) -> _UnitScales:
        if self._unit_scales is None:
            one = torch.ones((), dtype=torch.float32, device=device)
            self._unit_scales = _UnitScales(one, one, one)
        return self._unit_scales
