"""Prevents: an engine that refuses its own flags, is ended too early, or is promised what its node cannot give."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.charts.engine import container, environ, flags, offload, pod, volume
from tests.charts.golden import name_of
from tests.charts.rendering import BASES, PRESETS, ROOT, refusal, render
from vllm_spans.config import SpansConfig
from vllm_spans.offload.settings import OffloadSettings

GIB = 1 << 30
_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for name, arguments in json.load(sys.stdin).items():
    try:
        make_arg_parser(FlexibleArgumentParser(prog=name)).parse_args(arguments)
    except BaseException as error:
        sys.exit(f"{name}: {error!r}")
"""


def test_vllm_takes_the_flags_of_every_preset() -> None:
    """By its own parser, once for all: importing it takes seconds."""
    lines = {}
    for preset in PRESETS:
        for kind in ("Deployment", "LeaderWorkerSet"):
            for thing in render(preset=preset).all(kind, "engine"):
                inner = thing["spec"].get("leaderWorkerTemplate", {})
                templates = [thing["spec"].get("template"), *inner.values()]
                for number, each in enumerate(t for t in templates if isinstance(t, dict)):
                    args = each["spec"]["containers"][0]["args"]
                    filled = [a.replace("$(LWS_WORKER_INDEX)", "1") for a in args]
                    lines[f"{name_of(preset)}-{number}"] = filled
    assert len(lines) > len(PRESETS)
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]


@pytest.mark.parametrize(
    "preset", [each for each in PRESETS if name_of(each) not in (*BASES, "multi-node")], ids=name_of
)
def test_the_engine_takes_the_settings_of_every_preset(preset: Any, helm: int) -> None:
    found = container(render(preset=preset, helm=helm))
    SpansConfig.from_sources(environ(found))
    settings = offload(found)
    if settings:
        OffloadSettings.from_extra_config(settings)


def test_spans_are_on_and_set_by_the_values(helm: int) -> None:
    values = {"gapPolicy": "full", "gapLength": 64, "maxSpans": 1000000, "delimiter": "###"}
    found = container(render({"spans": values}, helm=helm))
    assert environ(found)["VLLM_V1_SPANS_ENABLED"] == "1"
    config = SpansConfig.from_sources(environ(found))
    assert (config.gap_policy, config.gap_length, config.max_spans) == ("full", 64, 1000000)
    assert config.delimiter == "###"
    default = SpansConfig.from_sources(environ(container(render(helm=helm))))
    assert default == SpansConfig()


def test_model_flags_and_environment_are_those_of_the_values(helm: int) -> None:
    values = {
        "model": {"name": "a/b", "servedName": "b", "revision": "main", "maxLength": 1000000},
        "engine": {
            "args": ["--max-num-seqs", "8"],
            "env": [{"name": "A", "value": "b"}],
            "drainSeconds": 30,
        },
    }
    found = container(render(values, helm=helm))
    assert found["command"] == ["tini", "--", "vllm-spans", "serve"]
    assert found["args"][0] == "a/b"
    seen = flags(found["args"])
    assert (seen["served-model-name"], seen["revision"]) == ("b", "main")
    assert (seen["max-model-len"], seen["shutdown-timeout"]) == ("1000000", "30")
    assert found["args"][-2:] == ["--max-num-seqs", "8"]
    assert environ(found)["A"] == "b"


def test_running_requests_have_their_time_within_the_grace_period(helm: int) -> None:
    rendered = render({"engine": {"drainSeconds": 300}}, helm=helm)
    before = int(container(rendered)["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert before >= 5, "proxies hear of a pod's end one after the other"
    drain = int(flags(container(rendered)["args"])["shutdown-timeout"])
    assert drain == 300
    assert pod(rendered)["terminationGracePeriodSeconds"] >= before + drain + 10


def test_a_model_has_half_an_hour_to_load_unless_told_otherwise(helm: int) -> None:
    rendered = render(preset="single-gpu", helm=helm)
    probe = container(rendered)["startupProbe"]
    assert probe["httpGet"]["path"] == "/v1/models"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    progress = rendered.one("Deployment", "engine")["spec"]["progressDeadlineSeconds"]
    assert progress > 1800
    values = {"engine": {"probes": {"startupSeconds": 7203}}}
    probe = container(render(values, helm=helm))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 7203


def test_readiness_is_the_served_model_and_liveness_the_process(helm: int) -> None:
    found = container(render(helm=helm))
    assert found["readinessProbe"]["httpGet"] == {"path": "/v1/models", "port": "http"}
    assert found["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_key_comes_from_its_secret_and_probes_do_without_it(helm: int) -> None:
    values = {"engine": {"apiKeySecret": {"name": "keys", "key": "k"}}}
    found = container(render(values, helm=helm))
    secrets = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in found["env"]
        if "valueFrom" in each
    }
    assert secrets == {"VLLM_API_KEY": {"name": "keys", "key": "k"}}
    assert {found[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {
        "/health"
    }


def test_the_hubs_token_comes_from_its_secret(helm: int) -> None:
    values = {"model": {"gated": True, "tokenSecret": {"name": "hub"}}}
    found = container(render(values, helm=helm))
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in found["env"]
    assert "HF_TOKEN" not in str(container(render(helm=helm))["env"])


def test_gpus_are_asked_for_as_text_beside_the_other_resources(helm: int) -> None:
    values = {"engine": {"gpus": 2, "tensorParallelSize": 2, "gpuResource": "amd.com/gpu"}}
    found = container(render(values, preset="single-gpu", helm=helm))
    for kind in ("limits", "requests"):
        assert found["resources"][kind]["amd.com/gpu"] == "2"
        assert found["resources"][kind]["memory"]
    assert flags(found["args"])["tensor-parallel-size"] == "2"
    assert "gpu" not in str(container(render(helm=helm))["resources"])


def test_both_tiers_reach_the_connector_in_bytes(helm: int) -> None:
    values = {
        "offload": {
            "cpu": {"enabled": True, "size": "512Mi"},
            "shared": {"enabled": True, "size": "10Gi"},
            "policy": "arc",
            "loadWhen": "always",
        }
    }
    rendered = render(values, helm=helm)
    assert offload(container(rendered)) == {
        "cpu_memory": GIB // 2,
        "files": "/var/lib/vllm-spans/kv",
        "files_limit": 9 * GIB,
        "policy": "arc",
        "load_when": "always",
    }
    mounts = {each["name"]: each["mountPath"] for each in container(rendered)["volumeMounts"]}
    assert mounts["kv"] == "/var/lib/vllm-spans/kv"
    claim = rendered.one("PersistentVolumeClaim")["metadata"]["name"]
    assert volume(pod(rendered), "kv") == {"persistentVolumeClaim": {"claimName": claim}}


def test_without_tiers_there_is_no_connector_and_no_volume(helm: int) -> None:
    rendered = render({"offload": {"cpu": {"enabled": False}}}, helm=helm)
    assert not offload(container(rendered))
    assert not [each for each in pod(rendered)["volumes"] if each["name"] == "kv"]


def test_all_that_is_written_has_a_place(helm: int) -> None:
    rendered = render(helm=helm)
    assert container(rendered)["securityContext"]["readOnlyRootFilesystem"] is True
    places = {each["mountPath"] for each in container(rendered)["volumeMounts"]}
    assert places == {"/var/cache/vllm-spans", "/tmp", "/dev/shm"}
    assert volume(pod(rendered), "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_a_rollout_needs_no_spare_gpu_and_interrupts_no_cpu_engine(helm: int) -> None:
    def update(preset: str) -> dict[str, Any]:
        spec = render(preset=preset, helm=helm).one("Deployment", "engine")["spec"]
        return spec["strategy"]["rollingUpdate"]

    assert update("single-gpu") == {"maxSurge": 0, "maxUnavailable": 1}
    assert update("cpu-demo") == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_number_of_engines_is_an_autoscalers_where_there_is_one(helm: int) -> None:
    assert render(helm=helm).one("Deployment", "engine")["spec"]["replicas"] == 1
    values = {"autoscaling": {"hpa": {"enabled": True}}}
    assert "replicas" not in render(values, helm=helm).one("Deployment", "engine")["spec"]


def test_groups_are_openshifts_where_it_sets_them(helm: int) -> None:
    assert "fsGroup" not in pod(render(preset="openshift", helm=helm))["securityContext"]
    assert pod(render(helm=helm))["securityContext"]["fsGroup"] == 10001
    for preset in ("openshift", "cpu-demo"):
        assert "runAsUser" not in str(pod(render(preset=preset, helm=helm)))


def test_placement_and_pull_secrets_are_those_of_the_values(helm: int) -> None:
    engine = {
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "podLabels": {"team": "ml"},
        "podAnnotations": {"a": "b"},
    }
    values = {"engine": engine, "imagePullSecrets": [{"name": "registry"}]}
    rendered = render(values, helm=helm)
    for name in ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName"):
        assert pod(rendered)[name] == engine[name]
    assert pod(rendered)["imagePullSecrets"] == [{"name": "registry"}]
    metadata = rendered.one("Deployment", "engine")["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "ml" and metadata["annotations"] == {"a": "b"}


def gpus(**engine: Any) -> dict[str, Any]:
    return {"engine": {"gpus": 1, **engine}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": {"name": ""}}, "model.name is empty. Set it"),
        ({"model": {"gated": True}}, "model.tokenSecret.name is empty"),
        (gpus(gpus=2), "engine.tensorParallelSize is 1 and there are 2 GPUs"),
        (gpus(tensorParallelSize=4), "engine.tensorParallelSize is 4 and there are 1 GPUs"),
        (gpus(nodes=2), "Set engine.kind to LeaderWorkerSet"),
        (
            gpus(resources={"limits": {"nvidia.com/gpu": 1}}),
            "engine.resources.limits names nvidia.com/gpu, which engine.gpus sets",
        ),
        ({"engine": {"shm": {"size": "300Mi"}}}, "engine.shm.size is 300Mi and the CPU tier"),
        (
            {"engine": {"shm": {"size": "64Mi"}}, "offload": {"cpu": {"enabled": False}}},
            "engine.shm.size is 64Mi and the CPU tier takes 0 MiB",
        ),
        ({"offload": {"cpu": {"size": "1Gi"}}}, "Raise engine.shm.size, or lower offload.cpu.size"),
        (
            {"engine": {"resources": {"limits": {"memory": "1G"}}}},
            "engine.resources.limits.memory is 1G",
        ),
        (
            {
                "engine": {"replicas": 2},
                "offload": {"shared": {"enabled": True, "accessMode": "ReadWriteOnce"}},
            },
            "offload.shared.accessMode is ReadWriteOnce and several engine pods share",
        ),
        (
            {"offload": {"shared": {"enabled": True, "size": "1Gi", "limit": "2Gi"}}},
            "offload.shared.limit (2Gi) is more than offload.shared.size (1Gi)",
        ),
        (
            {"engine": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}},
            "engine.rollout.maxSurge and engine.rollout.maxUnavailable are both 0",
        ),
        ({"engine": {"replicas": -1}}, "replicas"),
        ({"engine": {"replica": 1}}, "replica"),
        ({"engine": {"args": "--max-num-seqs 8"}}, "args"),
        ({"engine": {"shm": {"size": "1GB"}}}, "size"),
        ({"engine": {"probes": {"startupSeconds": 5}}}, "startupSeconds"),
        ({"engine": {"env": [{"value": "b"}]}}, "env"),
        ({"spans": {"gapPolicy": "legolinc"}}, "gapPolicy"),
        ({"spans": {"gapLength": "32"}}, "gapLength"),
        ({"offload": {"loadWhen": "never"}}, "loadWhen"),
        ({"model": {"nam": "x"}}, "nam"),
        ({"image": {"repository": "Team/X"}}, "repository"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, helm=helm)


@pytest.mark.parametrize("autoscaler", ["hpa", "keda"])
def test_a_volume_for_one_is_refused_where_engines_come_and_go(helm: int, autoscaler: str) -> None:
    values = {
        "autoscaling": {autoscaler: {"enabled": True}},
        "offload": {"shared": {"enabled": True, "accessMode": "ReadWriteOnce"}},
    }
    assert "Use a storage class with ReadWriteMany" in refusal(values, helm=helm)
