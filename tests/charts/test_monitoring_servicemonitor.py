"""Prevents: an exporter that Prometheus does not scrape, or whose labels it renames."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import refusal, render


def service_monitor(**values: Any) -> dict[str, Any]:
    return {"monitoring": {"serviceMonitor": {"enabled": True, **values}}}


def test_it_scrapes_the_exporters_service(helm: int) -> None:
    rendered = render(service_monitor(interval="5s", scrapeTimeout="4s"), helm=helm)
    spec = rendered.one("ServiceMonitor", "exporter")["spec"]
    service = rendered.one("Service", "exporter")
    wanted = spec["selector"]["matchLabels"]
    chosen = [
        each["metadata"]["name"]
        for each in rendered.all("Service")
        if wanted.items() <= each["metadata"]["labels"].items()
    ]
    assert chosen == [service["metadata"]["name"]]
    (endpoint,) = spec["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert (endpoint["path"], endpoint["interval"], endpoint["scrapeTimeout"]) == (
        "/metrics",
        "5s",
        "4s",
    )


def test_the_exporters_labels_are_kept(helm: int) -> None:
    """Its label `pod` is an engine's name; the dashboards would find nothing under `exported_pod`."""
    (endpoint,) = render(service_monitor(), helm=helm).one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True


def test_prometheus_finds_it_by_labels_of_the_values(helm: int) -> None:
    labels = render(service_monitor(labels={"release": "prom"}), helm=helm).one("ServiceMonitor")
    assert labels["metadata"]["labels"]["release"] == "prom"
    assert labels["metadata"]["labels"]["app.kubernetes.io/component"] == "exporter"


def test_none_without_being_asked_for(helm: int) -> None:
    """Its kind exists only where the operator is installed: an installation elsewhere would fail."""
    assert not render(helm=helm).all("ServiceMonitor")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"interval": 15}, "interval"),
        ({"interval": "15 s"}, "interval"),
        ({"scrapeTimeout": "soon"}, "scrapeTimeout"),
        ({"labels": {"release": 1}}, "labels"),
        ({"enable": True}, "enable"),
        ({"scrapeTimeout": "20s"}, "monitoring.serviceMonitor.scrapeTimeout (20s) is longer"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(service_monitor(**values), helm=helm)


def test_there_has_to_be_an_exporter(helm: int) -> None:
    values = service_monitor() | {"exporter": {"enabled": False}}
    assert "Set exporter.enabled" in refusal(values, helm=helm)
