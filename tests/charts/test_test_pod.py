"""Prevents: a `helm test` that passes whatever the engines do, or fails where all is well.

Its script runs here against a server of the standard library that answers as an engine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.charts.rendering import Render, refusal, render


class Engine(ThreadingHTTPServer):
    """Counts chats; from the third on the document is cached."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.chats = 0
        self.cached = 128
        self.model = "smollm2"
        self.text = "The moon."
        self.key: str | None = None


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._answer({"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["documents"] and body["model"]
        self.server.chats += 1
        cached = self.server.cached if self.server.chats > 2 else 0
        usage = {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": cached}}
        self._answer({"choices": [{"message": {"content": self.server.text}}], "usage": usage})

    def _answer(self, content: Any) -> None:
        key = self.server.key
        allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
        text = json.dumps(content if allowed else {"error": "no key"}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def container(rendered: Render) -> dict[str, Any]:
    (found,) = rendered.one("Pod", "test")["spec"]["containers"]
    return found


def run(engine: Engine, helm: int, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the pod's own command against the server."""
    found = container(render(helm=helm))
    program, *rest = found["command"]
    assert program == "python3"
    given = {each["name"]: each["value"] for each in found["env"] if "value" in each}
    given |= {"URL": f"http://127.0.0.1:{engine.server_port}", **environ}
    return subprocess.run(
        [sys.executable, *rest, *found["args"]],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_passes_once_a_document_is_reused(engine: Engine, helm: int) -> None:
    done = run(engine, helm)
    assert not done.returncode, done.stderr
    assert "smollm2 answers; 128 of 200 tokens were reused" in done.stdout
    assert engine.chats == 3


def test_it_sends_the_key(engine: Engine, helm: int) -> None:
    engine.key = "secret"
    refused = run(engine, helm)
    assert refused.returncode and "HTTP 401" in refused.stderr
    assert not run(engine, helm, API_KEY="secret").returncode
    values = {"engine": {"apiKeySecret": {"name": "keys"}}}
    reference = container(render(values, helm=helm))["env"][-1]
    assert reference == {
        "name": "API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api-key"}},
    }


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("cached", 0, "every answer computed the document anew"),
        ("model", "other", "serves ['other'], not smollm2"),
        ("text", "", "the answer is empty"),
    ],
)
def test_it_fails_where_something_is_wrong(
    engine: Engine, helm: int, attribute: str, value: Any, says: str
) -> None:
    setattr(engine, attribute, value)
    done = run(engine, helm)
    assert done.returncode == 1 and says in done.stderr


def test_it_fails_without_a_server(engine: Engine, helm: int) -> None:
    done = run(engine, helm, URL="http://127.0.0.1:9")
    assert done.returncode == 1 and "is an engine ready?" in done.stderr


def test_it_is_a_hook_that_is_left_only_when_it_fails(helm: int) -> None:
    metadata = render(helm=helm).one("Pod", "test")["metadata"]
    assert metadata["annotations"]["helm.sh/hook"] == "test"
    policies = metadata["annotations"]["helm.sh/hook-delete-policy"].split(",")
    assert set(policies) == {"before-hook-creation", "hook-succeeded"}


def test_it_asks_this_releases_service(helm: int) -> None:
    rendered = render({"service": {"port": 80}}, helm=helm)
    given = {each["name"]: each["value"] for each in container(rendered)["env"]}
    name = rendered.one("Service", "engine")["metadata"]["name"]
    assert given["URL"] == f"http://{name}:80"


def test_none_where_it_is_switched_off(helm: int) -> None:
    assert not render({"test": {"enabled": False}}, helm=helm).all("Pod")


@pytest.mark.parametrize("values", [{"enabled": 1}, {"image": {}}, {"resources": {"cpu": 1}}])
def test_what_is_no_value_is_refused(helm: int, values: dict[str, Any]) -> None:
    wrong = "cpu" if "resources" in values else next(iter(values))
    assert wrong in refusal({"test": values}, helm=helm)
