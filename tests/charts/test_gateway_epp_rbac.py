"""Prevents: a picker that may not see its pool, or may change anything."""

from __future__ import annotations

import pytest

from tests.charts.rendering import NAMESPACE, refusal, render
from tests.charts.test_gateway_inferencepool import IMAGE, pool


def test_it_may_read_pods_and_pools_of_its_namespace(helm: int) -> None:
    rendered = render(pool(), helm=helm)
    role = rendered.one("Role", "epp")
    seen = {
        resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]
    }
    reading = {"get", "list", "watch"}
    assert seen == dict.fromkeys(
        ("pods", "inferencepools", "inferenceobjectives", "inferencemodelrewrites"), reading
    )
    binding = rendered.one("RoleBinding", "epp")
    account = rendered.one("ServiceAccount", "epp")["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    ]
    assert role["metadata"]["namespace"] == NAMESPACE


def test_it_needs_no_rights_over_the_cluster(helm: int) -> None:
    rendered = render(pool(), helm=helm)
    assert not rendered.all("ClusterRole") and not rendered.all("ClusterRoleBinding")
    (container,) = rendered.one("Deployment", "epp")["spec"]["template"]["spec"]["containers"]
    assert "--metrics-endpoint-auth=false" in container["args"]


def test_it_does_not_share_the_exporters_account(helm: int) -> None:
    rendered = render(pool(), helm=helm)
    names = [each["metadata"]["name"] for each in rendered.all("ServiceAccount")]
    assert len(names) == len(set(names))


def test_nothing_where_another_picker_is_named(helm: int) -> None:
    rendered = render(pool({"create": False, "service": "their-epp"}), helm=helm)
    for kind in ("Role", "RoleBinding", "ServiceAccount"):
        assert not rendered.all(kind, "epp")


@pytest.mark.parametrize("key", ["rbac", "serviceAccount", "clusterRole", "verbs"])
def test_other_rights_are_refused(helm: int, key: str) -> None:
    assert key in refusal(pool({"image": IMAGE, key: {}}), helm=helm)
