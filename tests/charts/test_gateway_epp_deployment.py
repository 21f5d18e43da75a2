"""Prevents: a picker of another pool, with an old configuration, or that is more than one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import NAMESPACE, Render, refusal, render
from tests.charts.test_gateway_inferencepool import IMAGE, pool


def picker(rendered: Render) -> dict[str, Any]:
    (found,) = rendered.one("Deployment", "epp")["spec"]["template"]["spec"]["containers"]
    return found


def test_it_picks_for_the_pool_that_names_it(helm: int) -> None:
    rendered = render(pool({"image": IMAGE, "port": 9100, "args": ["--v=4"]}), helm=helm)
    flags = dict(each.removeprefix("--").split("=", 1) for each in picker(rendered)["args"])
    reference = rendered.one("InferencePool")
    group, _ = reference["apiVersion"].split("/")
    assert (flags["pool-group"], flags["pool-namespace"]) == (group, NAMESPACE)
    assert flags["pool-name"] == reference["metadata"]["name"]
    assert (flags["grpc-port"], flags["v"]) == ("9100", "4")
    ports = {port["name"]: port["containerPort"] for port in picker(rendered)["ports"]}
    assert ports == {"grpc": 9100, "grpc-health": 9003, "metrics": 9090}


def test_it_reads_the_configuration_that_is_installed(helm: int) -> None:
    rendered = render(pool(), helm=helm)
    flags = dict(each.removeprefix("--").split("=", 1) for each in picker(rendered)["args"])
    folder, _, name = flags["config-file"].rpartition("/")
    (mount,) = [each for each in picker(rendered)["volumeMounts"] if each["mountPath"] == folder]
    pod = rendered.one("Deployment", "epp")["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    config = next(
        each
        for each in rendered.all("ConfigMap", "epp")
        if each["metadata"]["name"] == volume["configMap"]["name"]
    )
    assert name in config["data"]


def test_another_configuration_restarts_it(helm: int) -> None:
    def checksum(weight: int) -> str:
        config = {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [{"type": "queue-scorer"}],
            "schedulingProfiles": [
                {"name": "default", "plugins": [{"pluginRef": "queue-scorer", "weight": weight}]}
            ],
        }
        rendered = render(pool({"image": IMAGE, "config": config}), helm=helm)
        template = rendered.one("Deployment", "epp")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum(1) == checksum(1) != checksum(2)


def test_one_picker_at_a_time(helm: int) -> None:
    spec = render(pool(), helm=helm).one("Deployment", "epp")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_it_is_the_image_of_the_values_under_its_own_account(helm: int) -> None:
    digest = "sha256:" + "b" * 64
    image = {"registry": "registry.test", "repository": "llm-d/epp", "digest": digest}
    rendered = render(pool({"image": image}), helm=helm)
    assert picker(rendered)["image"] == f"registry.test/llm-d/epp@{digest}"
    pod = rendered.one("Deployment", "epp")["spec"]["template"]["spec"]
    account = rendered.one("ServiceAccount", "epp")["metadata"]["name"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (account, True)
    assert picker(rendered)["securityContext"]["readOnlyRootFilesystem"] is True


def test_none_without_a_pool(helm: int) -> None:
    values = {"inferencePool": {"endpointPicker": {"create": True, "image": IMAGE}}}
    assert not render(values, helm=helm).all("Deployment", "epp")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"args": "--v=4"}, "args"),
        ({"terminationGracePeriodSeconds": "2m"}, "terminationGracePeriodSeconds"),
        ({"resources": {"limits": {"memory": "2 GB"}}}, "memory"),
        ({"config": {"plugins": "x"}}, "plugins"),
        ({"config": "plugins: []"}, "config"),
        ({"image": {**IMAGE, "digest": "sha256:12"}}, "digest"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(pool({"image": IMAGE, **values}), helm=helm)
