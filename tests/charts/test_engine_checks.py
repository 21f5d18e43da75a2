"""Prevents: an install that succeeds and can never serve, or that serves something else than its values say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.engine import container, offload
from tests.charts.rendering import refusal, render

SHARED = {"offload": {"shared": {"enabled": True}}}
NO_TIERS = {"offload": {"cpu": {"enabled": False}}}


def args(*given: str) -> dict[str, Any]:
    return {"engine": {"args": list(given)}}


def online(seconds: int) -> dict[str, Any]:
    return {"model": {"offline": False}, "engine": {"probes": {"startupSeconds": seconds}}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (args("--port=9000"), "engine.args has --port, which the chart sets. Use service.port"),
        (
            args("--max_model_len", "8"),
            "--max-model-len, which the chart sets. Use model.maxLength",
        ),
        (args("-tp", "2"), "-tp, which the chart sets. Use engine.tensorParallelSize"),
        (args("--api-key=secret"), "Use engine.apiKeySecret"),
        (args("--kv-transfer-config={}"), "Use offload."),
        (args("--dtype=float32", "--pipeline-parallel-size=2"), "not verified with spans"),
        (args("--speculative-config={}"), "K before its rotation. Remove it"),
        (args("--no-enable-prefix-caching"), "spans live in the prefix cache"),
        (args("--data-parallel-size=2"), "Raise engine.replicas instead"),
        (args("--enable-lora") | SHARED, "--enable-lora: the files of offload.shared"),
        (args("--enable-sleep-mode") | SHARED, "--enable-sleep-mode: weights could change"),
    ],
)
def test_flags_that_cannot_be_there_are_named_with_their_value(
    helm: int, values: dict[str, Any], says: str
) -> None:
    assert says in refusal(values, helm=helm)


@pytest.mark.parametrize(
    "values",
    [
        args("--portable"),  # only begins like one
        args("--enable-lora", "--max-lora-rank=8"),
        args("--data-parallel-size=2") | NO_TIERS,
        args("--max-num-seqs", "8"),
    ],
)
def test_other_flags_are_passed_on(helm: int, values: dict[str, Any]) -> None:
    wanted = values["engine"]["args"]
    assert container(render(values, helm=helm))["args"][-len(wanted) :] == wanted


@pytest.mark.parametrize("seconds", [600, 1799])
def test_a_download_has_half_an_hour(helm: int, seconds: int) -> None:
    assert "Use 1800 or more, or set model.offline" in refusal(online(seconds), helm=helm)
    probe = container(render(online(1800), helm=helm))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


@pytest.mark.parametrize("tier", ["cpu", "shared"])
def test_tiers_are_of_one_node(helm: int, tier: str) -> None:
    values = {"offload": {tier: {"enabled": True}}}
    says = "engine.nodes is 2 and a tier of offload is on"
    assert says in refusal(values, preset="multi-node", helm=helm)
    assert render(preset="multi-node", helm=helm).one("LeaderWorkerSet")


def test_memory_that_the_tier_takes_is_asked_for(helm: int) -> None:
    def values(requested: str) -> dict[str, Any]:
        resources = {"limits": {"memory": "8Gi"}, "requests": {"memory": requested}}
        engine = {"shm": {"size": "4Gi"}, "resources": resources}
        return {"engine": engine, "offload": {"cpu": {"size": "3Gi"}}}

    says = "engine.resources.requests.memory is 2Gi and the CPU tier alone takes 3072 MiB"
    assert says in refusal(values("2Gi"), helm=helm)
    assert offload(container(render(values("3Gi"), helm=helm)))["cpu_memory"] == 3 << 30


@pytest.mark.parametrize("surge", [1, "25%"])
@pytest.mark.parametrize("volume", ["model.cache", "offload.shared"])
def test_a_rollout_does_not_wait_for_a_volume_of_one_node(
    helm: int, surge: int | str, volume: str
) -> None:
    outer, inner = volume.split(".")
    values: dict[str, Any] = {
        outer: {inner: {"enabled": True, "accessMode": "ReadWriteOnce"}},
        "engine": {"rollout": {"maxSurge": surge, "maxUnavailable": 0}},
    }
    assert f"{volume}.accessMode is ReadWriteOnce: on another" in refusal(values, helm=helm)
    values["engine"]["rollout"] = {"maxSurge": 0, "maxUnavailable": 1}
    assert render(values, helm=helm).one("Deployment", "engine")


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_the_number_of_engines_is_set_once(helm: int, scaler: str) -> None:
    scaling = {"enabled": True} | ({"prometheus": "http://p:9090"} if scaler == "keda" else {})
    values = {"autoscaling": {scaler: scaling}, "engine": {"replicas": 3}}
    assert f"set autoscaling.{scaler}.minReplicas" in refusal(values, helm=helm)
    values["engine"] = {"replicas": 1}
    assert "replicas" not in render(values, helm=helm).one("Deployment", "engine")["spec"]
