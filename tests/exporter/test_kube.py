"""Prevents: a watch that ends for ever at an answer that no API server should give, but something in between does.

What a real API server answers is tried in tests/cluster; here a small server answers what that one never would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.server import free_port
from tests.exporter.engines import EnginePod, EnginePods, wait_until
from tests.exporter.test_pods import POD
from vllm_spans.exporter import kube
from vllm_spans.exporter.kube import KubernetesSource, client_maker
from vllm_spans.exporter.pods import PortRule

LIST = {"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": [POD]}


@pytest.fixture
def server() -> Iterator[EnginePod]:
    with EnginePods() as servers:
        yield servers.open()


def answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def lists_then(watched: bytes) -> Callable[[EnginePod, asyncio.StreamWriter], Any]:
    """Answers a list, and then what is given, to every second request."""

    async def behave(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
        is_list = pod.asked % 2 == 1
        writer.write(answer("200 OK", json.dumps(LIST).encode()) if is_list else watched)

    return behave


def always(text: bytes) -> Callable[[EnginePod, asyncio.StreamWriter], Any]:
    async def behave(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
        writer.write(text)

    return behave


def event(kind: str, content: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"


def source_of(url: str, folder: Path, failures: list[str], events: list[str]) -> KubernetesSource:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
        "current-context": "x",
    }
    path = folder / "config"
    path.write_text(json.dumps(config), encoding="utf-8")
    make_client, namespace = client_maker(str(path), None)
    return KubernetesSource(
        make_client, [namespace], "a=b", PortRule(), events.append, failures.append
    )


GONE = {"kind": "Status", "code": 410, "message": "too old resource version: 7 (99)"}
DENIED = {"kind": "Status", "code": 500, "message": "etcd has no leader"}


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (always(answer("401 Unauthorized", b"{}")), "unauthorized"),
        (always(answer("404 Not Found", b"{}")), "not_found"),
        (always(answer("500 Internal Server Error", b"<html>")), "server_error"),
        (always(answer("200 OK", b"<html>log in</html>")), "bad_answer"),
        (always(answer("200 OK", b"[]")), "bad_answer"),
        (always(answer("200 OK", b"{}")), "bad_answer"),
        (always(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "broken"),
        (always(b"no HTTP\r\n\r\n"), "broken"),
        (lists_then(answer("200 OK", event("ERROR", GONE))), "expired"),
        (lists_then(answer("200 OK", event("ERROR", DENIED))), "server_error"),
        (lists_then(answer("410 Gone", json.dumps(GONE).encode())), "expired"),
        (lists_then(answer("200 OK", event("ADDED", POD)[:-20])), "broken"),
        (lists_then(answer("200 OK", b'{"type": "ADDED", "object": {}}\n')), "bad_answer"),
    ],
)
def test_every_failure_is_counted_by_reason_and_tried_again(
    server: EnginePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Any, reason: str
) -> None:
    monkeypatch.setattr(kube, "FIRST_PAUSE", 0.01)
    server.behave = behave
    failures: list[str] = []
    source = source_of(server.url, tmp_path, failures, [])
    source.start()
    try:
        wait_until(lambda: len(failures) >= 3, "it is tried again")
        assert set(failures) == {reason}
        listed = source.problem() is None
        assert listed == bool(source.targets()), "the pods known last are lost"
    finally:
        server.behave = always(answer("500 Internal Server Error", b""))
        source.stop()


def test_a_watch_that_ends_is_taken_up_where_it_ended(
    server: EnginePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "FIRST_PAUSE", 0.01)
    newer = {**POD, "metadata": {**POD["metadata"], "uid": "u2", "resourceVersion": "8"}}
    mark = {"kind": "Pod", "metadata": {"resourceVersion": "9"}}
    asked: list[str] = []

    async def behave(pod: EnginePod, writer: asyncio.StreamWriter) -> None:
        asked.append(pod.request)
        if "watch=" not in pod.request:
            writer.write(answer("200 OK", json.dumps(LIST).encode()))
        elif "resourceVersion=7" in pod.request:
            writer.write(answer("200 OK", event("ADDED", newer) + event("BOOKMARK", mark)))
        else:
            writer.write(answer("200 OK", b""))

    server.behave = behave
    failures: list[str] = []
    events: list[str] = []
    source = source_of(server.url, tmp_path, failures, events)
    source.start()
    try:
        wait_until(lambda: len(asked) >= 5, "it is watched again")
        assert {target.key for target in source.targets()} == {"u1", "u2"}
        assert events == ["ADDED", "BOOKMARK"]
        assert not failures
        assert sum("watch=" not in request for request in asked) == 1, "it is listed again"
        assert all("resourceVersion=9" in request for request in asked[2:])
        assert all("labelSelector=a%3Db" in request for request in asked)
        assert all("/namespaces/llm/pods" in request for request in asked)
    finally:
        source.stop()


def test_a_server_that_refuses_connections_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "FIRST_PAUSE", 0.01)
    failures: list[str] = []
    source = source_of(f"http://127.0.0.1:{free_port()}", tmp_path, failures, [])
    source.start()
    wait_until(lambda: len(failures) >= 3, "it is tried again")
    source.stop()
    assert set(failures) == {"unreachable"}
    assert not source.connected
    assert "cannot be listed" in str(source.problem())
