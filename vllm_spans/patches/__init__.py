"""Every vLLM symbol that is replaced or extended, in one place. Applied by ``plugin.register`` when spans are on."""

from __future__ import annotations

from vllm_spans.patches import api, engine

PATCHED: list[str] = [*engine.PATCHED, *api.PATCHED]
"""``module:attribute`` of each; a test checks that none of them changes while spans are off."""

_applied = False


def apply() -> None:
    """Apply all patches once per process."""
    global _applied
    if _applied:
        return
    _applied = True
    engine.apply()
    api.apply()
