"""Prevents: a picker that the gateway cannot call, or calls as plain HTTP."""

from __future__ import annotations

import pytest

from tests.charts.rendering import refusal, render
from tests.charts.test_gateway_inferencepool import IMAGE, pool


def test_it_leads_to_the_pickers_ports(helm: int) -> None:
    rendered = render(pool({"image": IMAGE, "port": 9100}), helm=helm)
    service = rendered.one("Service", "epp")["spec"]
    pod = rendered.one("Deployment", "epp")["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    named = {each["name"]: each for each in pod["spec"]["containers"][0]["ports"]}
    assert [port["port"] for port in service["ports"]] == [9100, 9090]
    for port in service["ports"]:
        assert named[port["targetPort"]]["containerPort"] == port["port"]


def test_the_gateway_speaks_grpc_to_it(helm: int) -> None:
    ports = render(pool(), helm=helm).one("Service", "epp")["spec"]["ports"]
    assert {port["name"]: port.get("appProtocol") for port in ports} == {
        "grpc": "http2",
        "metrics": None,
    }


def test_none_where_another_picker_is_named(helm: int) -> None:
    values = pool({"create": False, "service": "their-epp"})
    assert not render(values, helm=helm).all("Service", "epp")


@pytest.mark.parametrize("port", [0, 65536, "grpc"])
def test_what_is_no_port_is_refused(helm: int, port: object) -> None:
    assert "port" in refusal(pool({"image": IMAGE, "port": port}), helm=helm)
