"""The CUDA backends with spans: FlashAttention (3 on Hopper, 2 elsewhere), and Triton where that does not reach."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_spans.attention.cuda_impl import SpansCudaAttentionImpl
from vllm_spans.attention.cuda_metadata import SpansCudaMetadataBuilder
from vllm_spans.attention.kv_dtype import KV_DTYPE_NAMES


class _OverScratch:
    """What holds for both: the stock kernel sees scratch pages in the model's dtype, whatever the cache is."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_DTYPE_NAMES)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in KV_DTYPE_NAMES

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        return super().supports_combination(head_size, dtype, None, *args, **kwargs)  # type: ignore[misc, no-any-return]

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


class SpansFlashAttentionImpl(SpansCudaAttentionImpl):
    stock_impl_cls = FlashAttentionImpl


class SpansFlashMetadataBuilder(SpansCudaMetadataBuilder):
    stock_builder_cls = FlashAttentionMetadataBuilder


class SpansFlashAttentionBackend(_OverScratch, FlashAttentionBackend):  # type: ignore[misc]
    """Registered in place of ``FLASH_ATTN``."""

    @staticmethod
    def get_impl_cls() -> Any:
        return SpansFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return SpansFlashMetadataBuilder


class SpansTritonAttentionImpl(SpansCudaAttentionImpl):
    stock_impl_cls = TritonAttentionImpl


class SpansTritonMetadataBuilder(SpansCudaMetadataBuilder):
    stock_builder_cls = TritonAttentionMetadataBuilder


class SpansTritonAttentionBackend(_OverScratch, TritonAttentionBackend):  # type: ignore[misc]
    """Registered in place of ``TRITON_ATTN``."""

    @staticmethod
    def get_impl_cls() -> Any:
        return SpansTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return SpansTritonMetadataBuilder
