"""Prevents: an exporter that its own program refuses to start, that sees the wrong pods, or that runs twice."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tests.charts.rendering import NAMESPACE, RELEASE, Render, refusal, render
from tests.charts.selecting import chosen_pods
from vllm_spans.exporter import cli


def container(rendered: Render) -> dict[str, Any]:
    (found,) = rendered.one("Deployment", "exporter")["spec"]["template"]["spec"]["containers"]
    return found


def arguments(rendered: Render) -> argparse.Namespace:
    """The command line as the program itself reads it."""
    parser = argparse.ArgumentParser(prog="vllm-spans exporter", exit_on_error=False)
    cli.add_arguments(parser)
    found = container(rendered)
    assert found["command"] == ["tini", "--", "vllm-spans", "exporter"]
    return parser.parse_args(found["args"])


def test_the_program_takes_its_arguments(helm: int) -> None:
    values = {
        "interval": 20,
        "timeout": 2.5,
        "window": 60,
        "concurrency": 8,
        "hotSpans": 5,
        "logLevel": "debug",
    }
    args = arguments(render({"exporter": values}, helm=helm))
    assert (args.interval, args.timeout, args.window) == (20, 2.5, 60)
    assert (args.concurrency, args.hot_spans, args.log_level) == (8, 5, "debug")
    assert args.listen == ("0.0.0.0", 9405)
    assert args.namespace == [NAMESPACE] and not args.all_namespaces


def test_it_finds_the_engine_pods_of_its_release_and_no_others(helm: int) -> None:
    rendered = render(helm=helm)
    chosen = chosen_pods(rendered, arguments(rendered).selector)
    assert [kind for kind, _ in chosen] == ["Deployment"]
    assert {labels["app.kubernetes.io/component"] for _, labels in chosen} == {"engine"}
    other = render(helm=helm, release="other")
    assert not chosen_pods(other, arguments(rendered).selector)


def test_another_selector_and_other_namespaces_reach_the_program(helm: int) -> None:
    selector = "app.kubernetes.io/name=vllm-spans,tier in (chat, rag)"
    values = {"selector": selector, "namespaces": ["chat", "rag"]}
    args = arguments(render({"exporter": values}, helm=helm))
    assert (args.selector, args.namespace) == (selector, ["chat", "rag"])
    args = arguments(render({"exporter": {"allNamespaces": True}}, helm=helm))
    assert args.all_namespaces and not args.namespace


def test_one_pod_at_a_time_even_in_a_rollout(helm: int) -> None:
    spec = render(helm=helm).one("Deployment", "exporter")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_probes_ask_what_the_exporter_answers(helm: int) -> None:
    found = container(render(helm=helm))
    (port,) = found["ports"]
    assert (port["name"], port["containerPort"]) == ("metrics", 9405)
    assert found["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_the_pod_has_the_rights_it_needs_and_no_more(helm: int) -> None:
    rendered = render(helm=helm)
    pod = rendered.one("Deployment", "exporter")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert pod["serviceAccountName"] == f"{RELEASE}-vllm-spans-exporter"
    assert pod["securityContext"]["runAsNonRoot"] is True
    security = container(rendered)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_image_resources_and_placement_are_those_of_the_values(helm: int) -> None:
    digest = "sha256:" + "a" * 64
    values = {
        "image": {"registry": "registry.test:5000", "repository": "team/x", "digest": digest},
        "resources": {"limits": {"memory": "1Gi"}},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "podLabels": {"team": "ml"},
        "podAnnotations": {"prometheus.io/scrape": "true"},
    }
    rendered = render({"exporter": values}, helm=helm)
    found = container(rendered)
    assert found["image"] == f"registry.test:5000/team/x@{digest}"
    assert found["resources"]["limits"]["memory"] == "1Gi"
    template = rendered.one("Deployment", "exporter")["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert template["spec"]["tolerations"] == [{"key": "cpu", "operator": "Exists"}]
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["annotations"] == {"prometheus.io/scrape": "true"}


def test_none_where_it_is_switched_off(helm: int) -> None:
    assert not render({"exporter": {"enabled": False}}, helm=helm).all("Deployment", "exporter")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"timeout": 15}, "exporter.timeout (15) must be less than exporter.interval (15)"),
        ({"interval": 200}, "exporter.window (300) must be at least twice exporter.interval (200)"),
        (
            {"allNamespaces": True, "namespaces": ["a"]},
            "exporter.allNamespaces and exporter.namespaces exclude each other",
        ),
        ({"serviceAccount": {"create": False}}, "exporter.serviceAccount.name is empty"),
        ({"interval": "15s"}, "interval"),
        ({"intervall": 15}, "intervall"),
        ({"hotSpans": 0}, "hotSpans"),
        ({"logLevel": "trace"}, "logLevel"),
        ({"replicas": 2}, "replicas"),
        ({"namespaces": ["Chat"]}, "namespaces"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"resources": {"limit": {}}}, "limit"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal({"exporter": values}, helm=helm)
