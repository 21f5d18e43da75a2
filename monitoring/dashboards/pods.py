"""Single engines: what they say themselves, beside vLLM's own metrics."""

from __future__ import annotations

from monitoring.dashboards.panels import TOKENS, Board, Panel, Query, Section, Variable

CHOSEN = 'model_name=~"$model",instance=~"$pod"'


def _rate(name: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate(vllm_spans_{name}_total{{{CHOSEN}}}[$__rate_interval]))"


def _vllm(name: str, window: str = "") -> str:
    """A metric of vLLM; Prometheus 2.x may see it as ``vllm_x`` instead of ``vllm:x``."""
    one, two = (f"{prefix}{name}{{{CHOSEN}}}{window}" for prefix in ("vllm:", "vllm_"))
    return f"(rate({one}) or rate({two}))" if window else f"({one} or {two})"


_REUSE = Section(
    "Reuse",
    (
        Panel(
            "Reuse ratio by pod",
            "Does one pod reuse less than the others?",
            (Query(f"{_rate('reused_tokens')} / ({_rate('lookup_tokens')} > 0)", "{{instance}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Gap-recompute ratio by pod",
            "How many tokens are computed again in context for each that is reused?",
            (Query(f"{_rate('gap_tokens')} / ({_rate('reused_tokens')} > 0)", "{{instance}}"),),
            "none",
        ),
        Panel(
            "Span tokens reused, by tier",
            "Which tier earns its keep?",
            (Query(_rate("reused_tokens", "instance, tier"), "{{instance}} {{tier}}"),),
            TOKENS,
            "stacked",
        ),
        Panel(
            "Span tokens computed",
            "What do new documents, gaps and evicted heads cost?",
            (
                Query(_rate("isolated_tokens"), "{{instance}} on their own"),
                Query(_rate("isolated_head_tokens"), "{{instance}} heads for blocks behind them"),
                Query(_rate("gap_tokens"), "{{instance}} gaps"),
            ),
            TOKENS,
            "stacked",
        ),
        Panel(
            "Requests with spans by outcome",
            "How many found all of their spans, some, or none?",
            (Query(_rate("requests", "outcome"), "{{outcome}}"),),
            "reqps",
            "stacked",
        ),
        Panel(
            "Prompts with spans: what they are made of",
            "Which share of their tokens is spans, and which is pads?",
            (
                Query(
                    f"({_rate('lookup_tokens')} + {_rate('gap_tokens')}) / ({_rate('prompt_tokens')} > 0)",
                    "{{instance}} spans",
                ),
                Query(
                    f"{_rate('pad_tokens')} / ({_rate('prompt_tokens')} > 0)", "{{instance}} pads"
                ),
            ),
            "percentunit",
            most=1,
        ),
    ),
)
_ENGINE = Section(
    "Engine",
    (
        Panel(
            "Time to the first token",
            "Does reuse reach the user? Nine of ten requests wait no longer.",
            (
                Query(
                    "histogram_quantile(0.9, sum by (instance, le) "
                    + _vllm("time_to_first_token_seconds_bucket", "[$__rate_interval]")
                    + ")",
                    "{{instance}}",
                ),
            ),
            "s",
        ),
        Panel(
            "KV cache in use",
            "Is there room for spans to stay?",
            (Query(f"max by (instance) {_vllm('kv_cache_usage_perc')}", "{{instance}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Pieces of work before requests go on, by kind",
            "How scattered is the work?",
            (Query(_rate("segments", "kind"), "{{kind}}"),),
            "ops",
        ),
        Panel(
            "Refused requests by reason",
            "Does a client send markup that cannot be served?",
            (Query(_rate("rejected", "reason"), "{{reason}}"),),
            "reqps",
        ),
    ),
)
_TIERS = Section(
    "CPU memory and files",
    (
        Panel(
            "CPU memory in use",
            "Is it full, so that it evicts?",
            (
                Query(
                    f"sum by (instance) (vllm_spans_cpu_memory_blocks{{{CHOSEN}}}) / "
                    f"(sum by (instance) (vllm_spans_cpu_memory_capacity_blocks{{{CHOSEN}}}) > 0)",
                    "{{instance}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Blocks stored, by tier",
            "How much is written?",
            (Query(_rate("stored_blocks", "instance, tier"), "{{instance}} {{tier}}"),),
            "ops",
        ),
        Panel(
            "Blocks that could not be loaded, by reason",
            "Is the storage broken or slow?",
            (Query(_rate("load_failures", "instance, reason"), "{{instance}} {{reason}}"),),
            "ops",
        ),
        Panel(
            "Blocks that could not be stored, by reason",
            "Is the disk full, or CPU memory too small?",
            (Query(_rate("store_failures", "instance, reason"), "{{instance}} {{reason}}"),),
            "ops",
        ),
        Panel(
            "Versions and settings",
            "Which version and settings does each pod run?",
            (Query(f"vllm_spans_build_info{{{CHOSEN}}}"),),
            "short",
            "table",
            24,
        ),
    ),
)
PODS = Board(
    "vllm-spans-pods",
    "vLLM spans: pods",
    "Reuse, work and tiers of single engines, from their own metrics.",
    (
        Variable("model", "Model", "label_values(vllm_spans_build_info, model_name)"),
        Variable(
            "pod", "Pod", 'label_values(vllm_spans_build_info{model_name=~"$model"}, instance)'
        ),
    ),
    (_REUSE, _ENGINE, _TIERS),
)
