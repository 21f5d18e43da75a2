"""What files of KV are made for: the content of the weights, and how the cache lays its blocks out."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_spans.core.identity import model_fingerprint
from vllm_spans.offload.file_format import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

WEIGHT_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "npcache", "dummy")
"""Values of ``--load-format`` whose weights are in files that can be found, or are always the same."""

PAGE_CONTENT = "K before RoPE, then V, token by token"

_VOLATILE = ("_name_or_path", "transformers_version", "architectures")


def cache_identity(
    config: VllmConfig, kv_cache_config: KVCacheConfig, payload_size: int
) -> Identity:
    """Identity of an engine's blocks, equal in every process and replica with the same model.

    Reads all weight files once; they have just been loaded, so they are in the page cache.

    Args:
        config: Configuration of the engine.
        kv_cache_config: Layout of its KV cache, with one group.
        payload_size: Bytes of one block over all layers, padding included.
    """
    model = config.model_config
    (group,) = kv_cache_config.kv_cache_groups
    cache = config.cache_config
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    hf_config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    return Identity(
        model={
            "weights": weights_digest(config),
            "fingerprint": model_fingerprint(config),
            "config": hashlib.sha256(
                json.dumps(hf_config, sort_keys=True, default=str).encode()
            ).hexdigest(),
        },
        geometry={
            "block_size": cache.block_size,
            "layers": list(group.layer_names),
            "page_size": group.kv_cache_spec.page_size_bytes,
            "layout": page_layout(config),
        },
        dtype=str(dtype).removeprefix("torch."),
        payload_size=payload_size,
    )


def page_layout(config: VllmConfig) -> str:
    """How a block's bytes lie in its pages, which is the attention backend's affair."""
    if current_platform.is_cpu():
        return f"cpu: {PAGE_CONTENT}"
    backend = config.attention_config.backend
    assert backend is not None, "the plugin chooses it"
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return f"{current_platform.device_type}, {backend.name}, {layout.name}: {PAGE_CONTENT}"


def weights_digest(config: VllmConfig) -> str:
    """SHA-256 over the content of the weight files, in the order of their names.

    Raises:
        ValueError: The weights are loaded in a way that has no files.
    """
    load_format = str(config.load_config.load_format)
    if load_format not in WEIGHT_FORMATS:
        raise ValueError(f"the weights of load format {load_format!r} cannot be told apart")
    if load_format == "dummy":
        # Kinds of devices draw other numbers from one seed.
        return f"dummy, seed {config.model_config.seed}, {current_platform.device_type}"
    start = time.monotonic()
    files = _weight_files(config)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_file_digest, files))
    logger.info(
        "told the weights apart by %d files in %.1f s", len(files), time.monotonic() - start
    )
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _weight_files(config: VllmConfig) -> Sequence[str]:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(config.load_config)
    _, files, _, _ = loader._prepare_weights(
        config.model_config.model,
        subfolder=None,
        revision=config.model_config.revision,
        fall_back_to_pt=True,
        allow_patterns_overrides=None,
    )
    return sorted(files, key=os.path.basename)


def _file_digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
