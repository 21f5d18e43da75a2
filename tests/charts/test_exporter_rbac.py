"""Prevents: an exporter that may not see its pods, or may do more than see them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.rendering import NAMESPACE, RELEASE, refusal, render

NAME = f"{RELEASE}-vllm-spans-exporter"
PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]


def test_it_may_list_and_watch_pods_of_its_namespace(helm: int) -> None:
    rendered = render(helm=helm)
    role = rendered.one("Role", "exporter")
    binding = rendered.one("RoleBinding", "exporter")
    account = rendered.one("ServiceAccount", "exporter")
    assert role["rules"] == PODS
    assert {each["metadata"]["namespace"] for each in (role, binding, account)} == {NAMESPACE}
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == NAME
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]
    assert account["automountServiceAccountToken"] is False
    assert not rendered.all("ClusterRole") and not rendered.all("ClusterRoleBinding")


def test_each_other_namespace_has_a_role_for_the_same_account(helm: int) -> None:
    rendered = render({"exporter": {"namespaces": ["chat", "rag"]}}, helm=helm)
    for kind in ("Role", "RoleBinding"):
        found = rendered.all(kind, "exporter")
        assert [each["metadata"]["namespace"] for each in found] == ["chat", "rag"]
    for binding in rendered.all("RoleBinding", "exporter"):
        assert binding["subjects"][0]["namespace"] == NAMESPACE


def test_all_namespaces_take_a_cluster_role_named_apart(helm: int) -> None:
    rendered = render({"exporter": {"allNamespaces": True}}, helm=helm)
    assert not rendered.all("Role", "exporter")
    role = rendered.one("ClusterRole", "exporter")
    binding = rendered.one("ClusterRoleBinding", "exporter")
    assert role["rules"] == PODS
    assert role["metadata"]["name"] == binding["roleRef"]["name"] == f"{NAMESPACE}-{NAME}"
    assert "namespace" not in role["metadata"]


def test_an_account_of_ones_own_is_used_and_not_made(helm: int) -> None:
    values = {"serviceAccount": {"create": False, "name": "mine"}}
    rendered = render({"exporter": values}, helm=helm)
    assert not rendered.all("ServiceAccount", "exporter")
    assert rendered.one("RoleBinding", "exporter")["subjects"][0]["name"] == "mine"
    pod = rendered.one("Deployment", "exporter")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "mine"


def test_no_rights_are_given_where_an_administrator_gives_them(helm: int) -> None:
    rendered = render({"exporter": {"rbac": False}}, helm=helm)
    assert not rendered.all("Role", "exporter") and not rendered.all("RoleBinding", "exporter")
    assert rendered.one("ServiceAccount", "exporter")


def test_the_accounts_annotations_are_those_of_the_values(helm: int) -> None:
    values = {"serviceAccount": {"name": "seen", "annotations": {"a": "b"}}}
    account = render({"exporter": values}, helm=helm).one("ServiceAccount", "exporter")
    assert (account["metadata"]["name"], account["metadata"]["annotations"]) == ("seen", {"a": "b"})


def test_nothing_where_the_exporter_is_switched_off(helm: int) -> None:
    rendered = render({"exporter": {"enabled": False}}, helm=helm)
    for kind in ("Role", "RoleBinding", "ServiceAccount"):
        assert not rendered.all(kind, "exporter")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rbac": "yes"}, "rbac"),
        ({"rbac": {"verbs": ["get"]}}, "rbac"),
        ({"serviceAccount": {"nam": "mine"}}, "nam"),
        ({"serviceAccount": {"name": "My_Account"}}, "name"),
        ({"serviceAccount": {"annotations": {"a": 1}}}, "annotations"),
        ({"serviceAccount": {"create": False, "name": ""}}, "exporter.serviceAccount.name"),
        ({"namespaces": "chat"}, "namespaces"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal({"exporter": values}, helm=helm)
