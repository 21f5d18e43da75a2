"""A fleet's view as text, as JSON, and read back from an exporter's page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_spans.exporter.collector import FLEET
from vllm_spans.exporter.fleet import FleetView, ModelView, StalePod

_RATIOS = {
    "gap_recompute_ratio": "gap_recompute_ratio",
    "reuse_ratio": "reuse_ratio",
    "pod_reuse_ratio_spread": "reuse_ratio_spread",
    "oldest_scrape_age_seconds": "oldest_scrape_age",
}
SILENT_SECONDS = 60.0
"""Time without a good page after which a pod is named."""

_FAILURES = ("load_failures", "store_failures", "rejected")


class StatusError(Exception):
    """There is no status to show; the text says why."""


def read_view(page: str) -> FleetView:
    """The view that an exporter's page shows.

    Args:
        page: Its ``/metrics``.

    Raises:
        StatusError: It is not an exporter's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    view = FleetView()
    families = 0
    try:
        for family in text_string_to_metric_families(page):
            if not family.name.startswith(FLEET):
                continue
            families += 1
            name = family.name.removeprefix(FLEET)
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                _take(view, name, dict(sample.labels), sample.value)
    except (ValueError, KeyError) as error:
        raise StatusError(f"this is not an exporter's page: {error}") from error
    if not families:
        raise StatusError(
            "this is not an exporter's page: it has no metric of a fleet. To look at an engine "
            "itself, give its address with --target"
        )
    return view


def _take(view: FleetView, name: str, labels: dict[str, str], value: float) -> None:
    model = labels.pop("model")
    if name == "pod_last_scrape_age_seconds":
        view.stale_pods.append(StalePod(model, labels["pod"], value))
        return
    of_model = view.models.setdefault(model, ModelView())
    if name == "pods":
        of_model.pods[labels["state"]] = int(value)
    elif name == "hot_span_requests":
        of_model.hot_spans.append((labels["span"], value))
    elif name in _RATIOS:
        setattr(of_model, _RATIOS[name], value)
    else:
        of_model.counters[name, next(iter(labels.values()), "")] = value


def as_json(view: FleetView, window: str) -> dict[str, Any]:
    """The view for scripts; ratios that do not exist are ``null``.

    Args:
        view: The view.
        window: What the ratios are of.
    """
    models = {}
    for model, of_model in sorted(view.models.items()):
        counters: dict[str, Any] = {}
        for (name, label), value in sorted(of_model.counters.items()):
            if label:
                counters.setdefault(name, {})[label] = value
            else:
                counters[name] = value
        models[model] = {
            "pods": of_model.pods,
            "reuse_ratio": of_model.reuse_ratio,
            "gap_recompute_ratio": of_model.gap_recompute_ratio,
            "pod_reuse_ratio_spread": of_model.reuse_ratio_spread,
            "oldest_scrape_age_seconds": of_model.oldest_scrape_age,
            "counters": counters,
            "hot_spans": [
                {"span": span, "requests": requests} for span, requests in of_model.hot_spans
            ],
        }
    return {"ratios_of": window, "models": models}


def as_text(view: FleetView, window: str) -> str:
    """The view for a terminal.

    Args:
        view: The view.
        window: What the ratios are of.
    """
    if not view.models:
        return "no pod has been found"
    blocks = [_model_text(model, view, window) for model in sorted(view.models)]
    return "\n\n".join(blocks)


def _model_text(name: str, view: FleetView, window: str) -> str:
    model = view.models[name]
    silent = [
        f"{pod.pod} {_age(pod.age)}"
        for pod in view.stale_pods
        if pod.model == name and pod.age > SILENT_SECONDS
    ]
    pods = [f"{count} {state}" for state, count in model.pods.items() if count]
    rows = [
        ("pods", ", ".join(pods) or "none"),
        ("oldest answer", _age(model.oldest_scrape_age)),
        *([("silent", ", ".join(silent))] if silent else []),
        ("reuse ratio", f"{_ratio(model.reuse_ratio)} {window}"),
        ("gap-recompute ratio", f"{_ratio(model.gap_recompute_ratio)} {window}"),
        ("spread between pods", _ratio(model.reuse_ratio_spread)),
        ("tokens looked up", _number(_sum(model, "lookup_tokens"))),
        ("  reused, by tier", _by_label(model, "reused_tokens")),
        ("  isolated", _number(_sum(model, "isolated_tokens"))),
        ("gap tokens", _by_label(model, "gap_tokens")),
        ("pad tokens", _number(_sum(model, "pad_tokens"))),
        ("requests", _by_label(model, "requests")),
    ]
    rows += [(kind.replace("_", " "), _by_label(model, kind, "none")) for kind in _FAILURES]
    spans = [f"{span} {_number(requests)}" for span, requests in model.hot_spans]
    lines = [f"{title:20} {text}" for title, text in rows]
    for title, chunk in zip(("hottest spans", "", ""), _chunks(spans, 4), strict=False):
        lines.append(f"{title:20} {'   '.join(chunk)}")
    return "\n".join([f"MODEL {name}", *lines])


def _sum(model: ModelView, name: str) -> float:
    return sum(value for (counter, _), value in model.counters.items() if counter == name)


def _by_label(model: ModelView, name: str, nothing: str = "0") -> str:
    found = [
        (label, value)
        for (counter, label), value in sorted(model.counters.items())
        if counter == name and value
    ]
    return ", ".join(f"{label} {_number(value)}" for label, value in found) or nothing


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _age(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s ago"


def _number(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def _chunks(items: list[str], size: int) -> Iterable[list[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))
