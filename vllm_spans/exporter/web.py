"""The exporter's own HTTP server: ``/metrics``, ``/healthz`` and ``/readyz``, in threads beside the loop."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_PLAIN = "text/plain; charset=utf-8"


class ListenError(OSError):
    """The address cannot be listened on."""


@contextlib.contextmanager
def serve(
    host: str, port: int, registry: CollectorRegistry, not_ready: Callable[[], str | None]
) -> Iterator[int]:
    """Answer until the block is left.

    Args:
        host: Address to listen on.
        port: Its port; 0 for any.
        registry: What ``/metrics`` shows.
        not_ready: Why ``/readyz`` says no; ``None`` to say yes.

    Yields:
        The port.

    Raises:
        ListenError: The address cannot be listened on.
    """

    try:
        server = _Server(host, port, registry, not_ready)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, name="web", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, not_ready: Callable[[], str | None]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        self.not_ready = not_ready
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # a client that is silent does not keep its thread
    server_version = "vllm-spans-exporter"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encode(self.server.registry))
        elif path == "/healthz":
            self._answer(200, _PLAIN, b"ok\n")
        elif path == "/readyz":
            reason = self.server.not_ready()
            self._answer(503 if reason else 200, _PLAIN, f"{reason or 'ok'}\n".encode())
        else:
            self._answer(404, _PLAIN, b"there are /metrics, /healthz and /readyz\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each scrape of the exporter would drown what it has to say."""
