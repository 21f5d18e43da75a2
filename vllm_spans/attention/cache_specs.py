"""KV cache specifications of an engine with spans: every layer keeps every block.

A span's blocks are read again at other positions, where other parts of them lie in a window.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)


def keep_all_blocks(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Let the cache manager treat layers with a sliding window as layers without.

    The attention itself keeps its window. With the hybrid manager off vLLM does the same, but only to windows that
    stand beside full attention: where all layers have one window it still frees what lies outside it.

    Args:
        specs: Of each attention layer, as the model runner gives them.

    Returns:
        The same with one kind of specification, so that they form one group.

    Raises:
        TypeError: A layer is neither full attention nor a sliding window.
    """
    kept: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        if type(spec) is SlidingWindowSpec:
            spec = replace_as(
                spec, FullAttentionSpec, drop=("sliding_window", "extra_retained_tokens")
            )
        if type(spec) is not FullAttentionSpec:
            raise TypeError(f"{name} has a {type(spec).__name__}: spans cannot keep its blocks")
        kept[name] = spec
    return kept
