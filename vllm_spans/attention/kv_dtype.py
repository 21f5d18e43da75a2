"""Dtypes of the KV cache, by vLLM's names."""

from __future__ import annotations

import torch

FP8_KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""vLLM's names of its quantised caches with one scale per layer; vLLM allocates them as bytes."""

UNQUANTISED_KV_DTYPES = ("auto", "float16", "bfloat16", "float32")
KV_DTYPE_NAMES = (*UNQUANTISED_KV_DTYPES, *FP8_KV_DTYPES)


def kernel_dtype(cache_dtype: str) -> torch.dtype | None:
    """Dtype to view a quantised cache as; ``None`` for a cache that is not quantised."""
    return FP8_KV_DTYPES.get(cache_dtype)
