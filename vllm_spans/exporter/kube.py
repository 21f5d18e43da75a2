"""Watches pods through a Kubernetes API server, and goes on whatever becomes of the server or of the right to ask it.

A list, then a watch from its version on, which the server ends now and then and which is taken up again where it ended.
After any failure the pods are listed anew, with growing pauses; until that works the pods known last stay. Reading
needs the rights to list and to watch pods, of one namespace only.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_spans.exporter.pods import PodTable, PortRule
from vllm_spans.exporter.quiet_log import QuietLog
from vllm_spans.exporter.targets import Target, TargetError

logger = logging.getLogger(__name__)

PAGE_SIZE = 500
WATCH_SECONDS = 120
"""After which the server ends a watch."""

READ_SECONDS = 150
"""Silence after which a connection counts as dead; a watch that works ends before that."""

CONNECT_SECONDS = 10
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REASONS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 410: "expired"}

ClientMaker = Callable[[], Any]
Counted = Callable[[str], None]


class WatchError(Exception):
    """A list or a watch ended otherwise than it should.

    Attributes:
        reason: Value of the label ``reason`` that it is counted under.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def client_maker(kubeconfig: str | None, context: str | None) -> tuple[ClientMaker, str]:
    """How to make a client, and the namespace that goes with the credentials.

    Args:
        kubeconfig: File to use; without it the pod's own service account, or the user's usual file.
        context: Context in that file.

    Returns:
        Something that makes an API client from credentials as they are then, and a namespace.

    Raises:
        TargetError: The client is not installed, or there are no credentials.
    """
    try:
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException
    except ImportError as error:
        raise TargetError(
            "finding pods needs the kubernetes package: install vllm_spans[exporter], "
            "or name the servers with --target"
        ) from error
    inside = not kubeconfig and not context and "KUBERNETES_SERVICE_HOST" in os.environ

    def make() -> Any:
        configuration = client.Configuration()
        if inside:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                kubeconfig,
                context,
                client_configuration=configuration,
                persist_config=False,
            )
        configuration.retries = False  # retries are ours, with pauses, and counted
        return client.CoreV1Api(client.ApiClient(configuration))

    try:
        make()
        if inside:
            return make, _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        contexts, active = config.list_kube_config_contexts(kubeconfig)
        chosen = next((each for each in contexts if each["name"] == context), active)
        return make, str(chosen["context"].get("namespace") or "default")
    except (ConfigException, OSError, KeyError, TypeError) as error:
        where = kubeconfig or ("the pod's service account" if inside else "~/.kube/config")
        raise TargetError(
            f"no credentials for a cluster in {where} ({error}): "
            "give --kubeconfig FILE, or name the servers with --target"
        ) from error


class KubernetesSource:
    """Pods of some namespaces, or of all.

    Args:
        make_client: See ``client_maker``.
        namespaces: Namespaces; empty for all.
        selector: Label selector of the pods.
        rule: Where in a pod its metrics are.
        on_event: Called with the type of each event.
        on_failure: Called with the reason of each failure.
    """

    def __init__(
        self,
        make_client: ClientMaker,
        namespaces: Sequence[str],
        selector: str,
        rule: PortRule,
        on_event: Counted,
        on_failure: Counted,
    ) -> None:
        self._watches = [
            PodWatch(make_client, namespace, selector, rule, on_event, on_failure)
            for namespace in (namespaces or (None,))
        ]

    def start(self) -> None:
        """Start one thread for each namespace."""
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        """Let the threads end. They are daemons: one that waits for the server does not keep the process."""
        for watch in self._watches:
            watch.stop()

    def targets(self) -> list[Target]:
        """The pods known now."""
        return [target for watch in self._watches for target in watch.targets()]

    def problem(self) -> str | None:
        """Why a namespace has never been listed."""
        return next((watch.problem for watch in self._watches if watch.problem), None)

    @property
    def connected(self) -> bool:
        """Whether every watch runs."""
        return all(watch.connected for watch in self._watches)


class PodWatch(threading.Thread):
    """The watch over one namespace, or over all for ``None``; see ``KubernetesSource`` for the arguments.

    Attributes:
        connected: Whether the watch runs.
        problem: Why there has never been a list; ``None`` when there has.
    """

    def __init__(
        self,
        make_client: ClientMaker,
        namespace: str | None,
        selector: str,
        rule: PortRule,
        on_event: Counted,
        on_failure: Counted,
    ) -> None:
        super().__init__(name=f"watch-{namespace or 'all'}", daemon=True)
        self._make_client = make_client
        self._namespace = namespace
        self._selector = selector
        self._on_event = on_event
        self._on_failure = on_failure
        self._table = PodTable(rule)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._log = QuietLog(logger)
        self._where = f"namespace {namespace}" if namespace else "all namespaces"
        self.connected = False
        self.problem: str | None = "the pods have not been listed yet"

    def targets(self) -> list[Target]:
        """The pods known now."""
        with self._lock:
            return list(self._table.targets.values())

    def stop(self) -> None:
        """Let the thread end after its next answer from the server."""
        self._stopping.set()

    def run(self) -> None:
        """List, watch, and begin again."""
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            try:
                api = self._make_client()  # anew: credentials may have been renewed
                version = self._list(api)
                self._log.well(self._where, "pods are watched")
                while not self._stopping.is_set():
                    began = time.monotonic()
                    version = self._watch(api, version)
                    pause = FIRST_PAUSE
                    if time.monotonic() - began < FIRST_PAUSE:
                        self._stopping.wait(
                            FIRST_PAUSE
                        )  # something in between ends watches at once
            except Exception as error:  # the thread must outlive whatever the client raises
                failure = _failure(error)
                self._on_failure(failure.reason)
                self._log.say(self._where, f"{failure.reason}: {failure}")
                if self.problem is not None:
                    self.problem = f"the pods of {self._where} cannot be listed: {failure}"
                self._stopping.wait(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, LONGEST_PAUSE)
            finally:
                self.connected = False

    def _list(self, api: Any) -> str:
        """Take in all pods, page by page.

        Returns:
            Version that a watch goes on from.
        """
        pods: list[dict[str, Any]] = []
        more: str | None = None
        while True:
            with self._ask(api, limit=PAGE_SIZE, _continue=more) as answer:
                page = _decode(answer.data)
            pods += page.get("items") or []
            more = page["metadata"].get("continue")
            if not more:
                break
        with self._lock:
            self._table.replace(pods)
        self.problem = None
        return str(page["metadata"]["resourceVersion"])

    def _watch(self, api: Any, version: str) -> str:
        """Take in changes until the server ends the watch.

        Returns:
            Version of the last change.
        """
        with self._ask(
            api,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
        ) as answer:
            self.connected = True
            for line in _lines(answer):
                event = _decode(line)
                kind, pod = str(event["type"]), event["object"]
                self._on_event(kind)
                if kind == "ERROR":
                    reason = _REASONS.get(pod.get("code"), "server_error")
                    raise WatchError(reason, str(pod.get("message", pod)))
                version = str(pod["metadata"]["resourceVersion"])
                if kind != "BOOKMARK":
                    with self._lock:
                        self._table.change(kind, pod)
                if self._stopping.is_set():
                    break
        return version

    def _ask(self, api: Any, **arguments: Any) -> Any:
        """Ask for pods; the answer is left unread, as models of whole pods cost far more than the fields needed."""
        arguments = {name: value for name, value in arguments.items() if value is not None}
        arguments |= {
            "label_selector": self._selector,
            "_preload_content": False,
            "_request_timeout": (CONNECT_SECONDS, READ_SECONDS),
        }
        if self._namespace is None:
            return _Answer(api.list_pod_for_all_namespaces(**arguments))
        return _Answer(api.list_namespaced_pod(self._namespace, **arguments))


class _Answer:
    """An answer whose connection is closed behind it: one that was not read to its end cannot be used again."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __enter__(self) -> Any:
        return self._answer

    def __exit__(self, *error: object) -> None:
        self._answer.close()


def _lines(answer: Any) -> Iterator[bytes]:
    rest = b""
    for chunk in answer.stream(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
    if rest:
        raise WatchError("broken", "the connection ended in the middle of a line")


def _decode(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WatchError("bad_answer", f"not JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise WatchError("bad_answer", f"no object: {text[:80]!r}")
    return value


def _failure(error: Exception) -> WatchError:
    """What went wrong, in a few words and under one of a few reasons."""
    if isinstance(error, WatchError):
        return error
    from kubernetes.client import ApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3 import exceptions

    if isinstance(error, ApiException):
        reason = _REASONS.get(error.status, "server_error")
        try:
            text = str(json.loads(error.body)["message"])
        except (ValueError, TypeError, KeyError):
            text = f"HTTP {error.status} {error.reason}"
        return WatchError(reason, text)
    # A connection that is refused is a kind of time-out to urllib3, so it comes first.
    if isinstance(error, exceptions.NewConnectionError):
        return WatchError("unreachable", str(error))
    if isinstance(error, exceptions.TimeoutError):
        return WatchError("timeout", str(error))
    if isinstance(error, exceptions.HTTPError):
        return WatchError("broken", str(error))
    if isinstance(error, ConfigException | OSError):
        return WatchError("credentials", str(error))
    return WatchError("bad_answer", f"{type(error).__name__}: {error}")
