"""Prevents: a drain of nodes that takes all engines at once, or that can never end."""

from __future__ import annotations

import pytest

from tests.charts.rendering import refusal, render
from tests.charts.selecting import pod_labels


def test_engines_go_one_after_the_other(helm: int) -> None:
    rendered = render(preset="multi-gpu", helm=helm)
    spec = rendered.one("PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == 1
    (labels,) = pod_labels(rendered.one("Deployment", "engine"))
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_a_single_engine_does_not_block_a_drain(helm: int) -> None:
    """A budget by minAvailable would, until somebody deletes it."""
    spec = render(helm=helm).one("PodDisruptionBudget")["spec"]
    assert "minAvailable" not in spec


def test_a_share_is_kept_as_one(helm: int) -> None:
    spec = render({"pdb": {"maxUnavailable": "25%"}}, helm=helm).one("PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == "25%"


def test_none_where_it_is_switched_off(helm: int) -> None:
    assert not render({"pdb": {"enabled": False}}, helm=helm).all("PodDisruptionBudget")
    assert not render(preset="kubernetes-1.20", helm=helm).all("PodDisruptionBudget")


@pytest.mark.parametrize(
    "values", [{"maxUnavailable": -1}, {"maxUnavailable": "a few"}, {"minAvailable": 1}]
)
def test_what_is_no_budget_is_refused(helm: int, values: dict[str, object]) -> None:
    assert next(iter(values)) in refusal({"pdb": values}, helm=helm)
