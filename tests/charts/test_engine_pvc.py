"""Prevents: computed KV that goes with the release, claims nobody asked for, and claims made over existing ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.engine import pod, volume
from tests.charts.rendering import Render, refusal, render


def shared(**values: Any) -> dict[str, Any]:
    return {"offload": {"shared": {"enabled": True, **values}}}


def cache(**values: Any) -> dict[str, Any]:
    return {"model": {"cache": {"enabled": True, **values}}}


def claims(rendered: Render) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in rendered.all("PersistentVolumeClaim")}


def test_the_shared_volume_is_asked_for_and_outlives_the_release(helm: int) -> None:
    rendered = render(shared(size="2Ti", storageClass="files"), helm=helm)
    (claim,) = claims(rendered).values()
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "files",
        "resources": {"requests": {"storage": "2Ti"}},
    }
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_it_goes_with_the_release_where_asked_for(helm: int) -> None:
    (claim,) = claims(render(shared(keep=False), helm=helm)).values()
    assert "annotations" not in claim["metadata"]
    assert "storageClassName" not in claim["spec"], "the cluster's default"


def test_downloads_are_kept_apart_from_what_is_computed(helm: int) -> None:
    rollout = {"engine": {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}}
    rendered = render(cache(accessMode="ReadWriteOnce") | shared() | rollout, helm=helm)
    assert set(claims(rendered)) == {"demo-vllm-spans-cache", "demo-vllm-spans-kv"}
    kept = claims(rendered)["demo-vllm-spans-cache"]
    assert kept["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert volume(pod(rendered), "cache") == {
        "persistentVolumeClaim": {"claimName": "demo-vllm-spans-cache"}
    }


def test_existing_claims_are_used_and_none_made(helm: int) -> None:
    rendered = render(cache(claim="weights") | shared(claim="kv"), helm=helm)
    assert not claims(rendered)
    for name, claim in (("cache", "weights"), ("kv", "kv")):
        assert volume(pod(rendered), name)["persistentVolumeClaim"]["claimName"] == claim


def test_none_without_being_asked_for(helm: int) -> None:
    assert not claims(render(helm=helm))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (shared(size="many"), "size"),
        (shared(accessMode="ReadOnlyMany"), "accessMode"),
        (shared(limit="most"), "limit"),
        (shared(path="/kv"), "path"),
        (cache(size=-1), "size"),
        (cache(claims="x"), "claims"),
        (cache(accessMode="ReadWriteOnce") | {"engine": {"replicas": 2}}, "model.cache.accessMode"),
    ],
)
def test_what_cannot_work_is_refused(helm: int, values: dict[str, Any], says: str) -> None:
    assert says in refusal(values, helm=helm)
