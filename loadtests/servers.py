"""The two real servers of a comparison on this machine's CPU: stock vLLM and spans, with the embedded model.

Both are started with the same flags; they differ in the plugin alone. Both run at a low priority, so that a server that
uses every core does not starve the generator beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from demo.server import Server, free_port
from vllm_spans.cli import build_launch

# As it was before anything of vLLM was imported, which adds to LD_LIBRARY_PATH: the first server would lack that.
_ENVIRON = dict(os.environ)
_NICE = ("nice", "-n", "5")
_FLAGS = ("--enforce-eager", "--disable-uvicorn-access-log", "--max-model-len", "4096")


@dataclasses.dataclass(frozen=True)
class Command:
    """How a server is started.

    Attributes:
        command: Program and arguments.
        environ: Its environment.
    """

    command: list[str]
    environ: dict[str, str]


def server_command(
    spans: bool,
    port: int,
    environ: Mapping[str, str] = MappingProxyType(_ENVIRON),
    flags: Sequence[str] = _FLAGS,
) -> Command:
    """The command of ``vllm-spans serve``, or the same one for vLLM without the plugin.

    Args:
        spans: With the plugin.
        port: Where it listens.
        environ: The environment to extend.
        flags: The model, if it is not the embedded one, and flags of ``vllm serve``.
    """
    arguments = [*flags, "--host", "127.0.0.1", "--port", str(port)]
    launch = build_launch(arguments, {**environ, "VLLM_NO_USAGE_STATS": "1"})
    child = dict(launch.environ)
    if not spans:
        child = {k: v for k, v in child.items() if not k.startswith("VLLM_V1_SPANS_")}
        child["VLLM_PLUGINS"] = ""
    return Command([*_NICE, *launch.command], child)


@contextlib.contextmanager
def start_server(spans: bool, log: Path) -> Iterator[str]:
    """Serve the embedded model inside a ``with`` block; gives the server's address.

    Args:
        spans: With the plugin; else stock vLLM.
        log: Where it prints.

    Raises:
        demo.server.ServerError: It does not get ready.
    """
    port = free_port()
    made = server_command(spans, port)
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"starting {'spans' if spans else 'stock vLLM'} on port {port} (log: {log})", flush=True)
    with Server(made.command, port, log, made.environ) as server:
        server.wait_ready()
        yield server.url
