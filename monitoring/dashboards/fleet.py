"""The fleet by model: what the exporter says."""

from __future__ import annotations

from monitoring.dashboards.panels import TOKENS, Board, Panel, Query, Section, Variable

MODEL = 'model=~"$model"'


def _rate(name: str, by: str = "model", more: str = "") -> str:
    return f"sum by ({by}) (rate(vllm_spans_fleet_{name}_total{{{MODEL}{more}}}[$__rate_interval]))"


_REUSE = Section(
    "Reuse",
    (
        Panel(
            "Span tokens reused",
            "Of the span tokens past their gaps that the last minutes asked for, how many were there?",
            (Query(f"vllm_spans_fleet_reuse_ratio{{{MODEL}}}", "{{model}}"),),
            "percentunit",
            "number",
            6,
        ),
        Panel(
            "Gap tokens per reused token",
            "What does exactness cost? The alert's target is 0.5.",
            (Query(f"vllm_spans_fleet_gap_recompute_ratio{{{MODEL}}}", "{{model}}"),),
            "none",
            "number",
            6,
        ),
        Panel(
            "Pods ready",
            "How many engines with spans answer?",
            (
                Query(
                    f'sum by (model) (vllm_spans_fleet_pods{{{MODEL},state="ready"}})', "{{model}}"
                ),
            ),
            "none",
            "number",
            6,
        ),
        Panel(
            "Requests with spans",
            "Do clients mark anything?",
            (Query(_rate("requests"), "{{model}}"),),
            "reqps",
            "number",
            6,
        ),
        Panel(
            "Reuse ratio",
            "Does reuse hold, and did a deploy change it?",
            (Query(f"{_rate('reused_tokens')} / ({_rate('lookup_tokens')} > 0)", "{{model}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Gap-recompute ratio",
            "How many tokens are computed again in context for each that is reused?",
            (Query(f"{_rate('gap_tokens')} / ({_rate('reused_tokens')} > 0)", "{{model}}"),),
            "none",
        ),
        Panel(
            "What became of span tokens",
            "How much was reused, from which tier, and how much was computed?",
            (
                Query(_rate("reused_tokens", "tier"), "reused from {{tier}}"),
                Query(_rate("isolated_tokens", "job"), "computed on their own"),
                Query(_rate("gap_tokens", "policy"), "gap, {{policy}}"),
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
            "Hottest spans",
            "Which documents are asked for most?",
            (
                Query(
                    f"topk(20, sum by (model, span) (vllm_spans_fleet_hot_span_requests{{{MODEL}}}))"
                ),
            ),
            "short",
            "table",
        ),
        Panel(
            "Pad tokens",
            "Are spans too short for the block size?",
            (Query(_rate("pad_tokens"), "{{model}}"),),
            TOKENS,
        ),
    ),
)
_FAULTS = Section(
    "Faults",
    (
        Panel(
            "Refused requests by reason",
            "Does a client send markup that cannot be served?",
            (Query(_rate("rejected", "reason"), "{{reason}}"),),
            "reqps",
        ),
        Panel(
            "Reuse of the best pod less that of the worst",
            "Do pods of one model differ?",
            (Query(f"vllm_spans_fleet_pod_reuse_ratio_spread{{{MODEL}}}", "{{model}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Blocks that could not be loaded, by reason",
            "Is the storage broken or slow?",
            (Query(_rate("load_failures", "reason"), "{{reason}}"),),
            "ops",
        ),
        Panel(
            "Blocks that could not be stored, by reason",
            "Is the disk full, or CPU memory too small?",
            (Query(_rate("store_failures", "reason"), "{{reason}}"),),
            "ops",
        ),
    ),
)
_EXPORTER = Section(
    "Pods and exporter",
    (
        Panel(
            "Pods by state",
            "Which pods give no metrics, and why?",
            (Query(f"sum by (state) (vllm_spans_fleet_pods{{{MODEL}}})", "{{state}}"),),
            "none",
            "stacked",
        ),
        Panel(
            "Scrapes by result",
            "What do pods answer?",
            (
                Query(
                    "sum by (result) (rate(vllm_spans_exporter_scrapes_total[$__rate_interval]))",
                    "{{result}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Time to read all pods",
            "Does the exporter keep up?",
            (Query("vllm_spans_exporter_last_cycle_seconds", "{{instance}}"),),
            "s",
        ),
        Panel(
            "Watch of Kubernetes",
            "Does the exporter hear of changes to pods?",
            (
                Query("vllm_spans_exporter_watch_connected", "{{instance}} connected"),
                Query(
                    "sum by (reason) (rate(vllm_spans_exporter_watch_failures_total[$__rate_interval]))",
                    "failures: {{reason}}",
                ),
            ),
        ),
    ),
)
FLEET = Board(
    "vllm-spans-fleet",
    "vLLM spans: fleet",
    "Reuse and gaps of all pods of a model, from the exporter of vllm_spans.",
    (Variable("model", "Model", "label_values(vllm_spans_fleet_pods, model)"),),
    (_REUSE, _FAULTS, _EXPORTER),
)
