"""Prevents: engines with rights in the cluster."""

from __future__ import annotations

import pytest

from tests.charts.engine import pod
from tests.charts.rendering import refusal, render


def test_engines_have_an_account_without_rights_or_token(helm: int) -> None:
    rendered = render(helm=helm)
    account = rendered.one("ServiceAccount", "engine")
    assert pod(rendered)["serviceAccountName"] == account["metadata"]["name"]
    assert pod(rendered)["automountServiceAccountToken"] is False
    assert account["automountServiceAccountToken"] is False
    for binding in rendered.all("RoleBinding"):
        names = [subject["name"] for subject in binding["subjects"]]
        assert account["metadata"]["name"] not in names


def test_an_account_of_ones_own_is_used_and_not_made(helm: int) -> None:
    rendered = render({"serviceAccount": {"create": False, "name": "mine"}}, helm=helm)
    assert not rendered.all("ServiceAccount", "engine")
    assert pod(rendered)["serviceAccountName"] == "mine"
    rendered = render({"serviceAccount": {"create": False}}, helm=helm)
    assert pod(rendered)["serviceAccountName"] == "default"


def test_name_and_annotations_are_those_of_the_values(helm: int) -> None:
    values = {"serviceAccount": {"name": "seen", "annotations": {"role": "r"}}}
    account = render(values, helm=helm).one("ServiceAccount", "engine")["metadata"]
    assert (account["name"], account["annotations"]) == ("seen", {"role": "r"})


@pytest.mark.parametrize("values", [{"name": "My_Account"}, {"create": "yes"}, {"rules": []}])
def test_what_is_no_account_is_refused(helm: int, values: dict[str, object]) -> None:
    assert next(iter(values)) in refusal({"serviceAccount": values}, helm=helm)
