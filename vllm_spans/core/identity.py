"""Which engine is being built in this process.

``EngineCore.__init__`` builds the scheduler, which sees the configuration, and right after it the block hasher, whose
factory does not. The scheduler leaves here what the factory needs. (vLLM loads plugins inside that ``__init__``, so it
is too late there to wrap it.)
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_spans.config import SpansConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class EngineIdentity:
    """What the keys of an engine depend on.

    Attributes:
        config: Settings, resolved.
        model: Fingerprint of model and RoPE geometry.
    """

    config: SpansConfig
    model: str


_last: EngineIdentity | None = None


def announce(vllm_config: VllmConfig) -> EngineIdentity:
    """Leave the identity of the engine whose scheduler is being built."""
    global _last
    _last = EngineIdentity(
        SpansConfig.from_vllm_config(vllm_config), model_fingerprint(vllm_config)
    )
    return _last


def last_announced() -> EngineIdentity:
    """Identity of the engine whose scheduler was built last."""
    if _last is None:
        raise RuntimeError("the block hasher is built before any scheduler with spans")
    return _last


def model_fingerprint(config: VllmConfig) -> str:
    """Name of what makes KV of one engine fit another: model, revision, dtype, RoPE geometry and windows.

    Returns:
        A hex digest, equal in every process and replica with the same model.
    """
    model = config.model_config
    text_config = model.hf_text_config
    parts = {
        "model": model.model,
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "rope": getattr(text_config, "rope_parameters", None)
        or getattr(text_config, "rope_scaling", None),
        "theta": getattr(text_config, "rope_theta", None),
        "window": getattr(text_config, "sliding_window", None),
        "layer_types": getattr(text_config, "layer_types", None),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
