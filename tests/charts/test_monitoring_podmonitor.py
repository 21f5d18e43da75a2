"""Prevents: engines that Prometheus does not scrape, or shows by an address that tells nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import refusal, render


def pod_monitor(**values: Any) -> dict[str, Any]:
    return {"monitoring": {"podMonitor": {"enabled": True, **values}}}


def test_it_scrapes_the_engines_port(helm: int) -> None:
    rendered = render(pod_monitor(interval="5s", scrapeTimeout="4s"), helm=helm)
    spec = rendered.one("PodMonitor", "engine")["spec"]
    pod = rendered.one("Deployment", "engine")["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = spec["podMetricsEndpoints"]
    ports = [port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])]
    assert endpoint["port"] in ports
    assert (endpoint["path"], endpoint["interval"], endpoint["scrapeTimeout"]) == (
        "/metrics",
        "5s",
        "4s",
    )


def test_a_pod_is_named_as_the_dashboards_expect(helm: int) -> None:
    (endpoint,) = render(pod_monitor(), helm=helm).one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [
        {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}
    ]


def test_prometheus_finds_it_by_labels_of_the_values(helm: int) -> None:
    labels = render(pod_monitor(labels={"release": "prom"}), helm=helm).one("PodMonitor")
    assert labels["metadata"]["labels"]["release"] == "prom"
    assert labels["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"


def test_none_without_being_asked_for(helm: int) -> None:
    """Its kind exists only where the operator is installed: an installation elsewhere would fail."""
    assert not render(helm=helm).all("PodMonitor")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"interval": 15}, "interval"),
        ({"interval": "15 s"}, "interval"),
        ({"scrapeTimeout": "soon"}, "scrapeTimeout"),
        ({"labels": {"release": 1}}, "labels"),
        ({"enable": True}, "enable"),
        ({"scrapeTimeout": "20s"}, "monitoring.podMonitor.scrapeTimeout (20s) is longer"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(pod_monitor(**values), helm=helm)
