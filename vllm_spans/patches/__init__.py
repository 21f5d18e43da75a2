"""Every vLLM symbol that is replaced or extended, in one place. Applied by ``plugin.register`` when spans are on."""

from __future__ import annotations

PATCHED: list[str] = [
    # engine.py
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.v1.engine.core:get_request_block_hasher",
    "vllm.v1.engine.core:EngineCore.spans_explain",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.metrics.stats:SchedulerStats",
    "vllm.v1.attention.backends.registry:_ATTN_OVERRIDES",
]
"""``module:attribute`` of each; a test checks that none of them changes while spans are off."""

_applied = False


def apply() -> None:
    """Apply all patches once per process."""
    global _applied
    if _applied:
        return
    _applied = True
    from vllm_spans.patches import engine

    engine.apply()
    from vllm_spans.patches import api

    api.apply()
