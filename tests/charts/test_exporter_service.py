"""Prevents: a Service of the exporter that leads nowhere, or to engines."""

from __future__ import annotations

import pytest

from tests.charts.rendering import refusal, render


def test_it_leads_to_the_exporters_port(helm: int) -> None:
    rendered = render(helm=helm)
    service = rendered.one("Service", "exporter")["spec"]
    pod = rendered.one("Deployment", "exporter")["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    (port,) = service["ports"]
    assert (port["name"], port["port"]) == ("metrics", 9405)
    names = [each["name"] for each in pod["spec"]["containers"][0]["ports"]]
    assert port["targetPort"] in names


def test_the_exporters_address_is_not_the_engines(helm: int) -> None:
    rendered = render(helm=helm)
    engine, exporter = (rendered.one("Service", part) for part in ("engine", "exporter"))
    assert exporter["metadata"]["name"] == f"{engine['metadata']['name']}-exporter"
    assert engine["spec"]["selector"] != exporter["spec"]["selector"]


def test_none_where_the_exporter_is_switched_off(helm: int) -> None:
    assert not render({"exporter": {"enabled": False}}, helm=helm).all("Service", "exporter")


@pytest.mark.parametrize("values", [{"service": {"port": 80}}, {"port": 9405}, {"enabled": "no"}])
def test_what_is_no_value_is_refused(helm: int, values: dict[str, object]) -> None:
    """The port is fixed: the docs, alerts and `vllm-spans status` name it."""
    assert next(iter(values)) in refusal({"exporter": values}, helm=helm)
