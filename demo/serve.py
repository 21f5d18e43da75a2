"""Leave the server with the embedded model up in the foreground: what `make serve` runs."""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from demo.__main__ import (
    MODEL,
    QUESTION,
    Document,
    Progress,
    load_documents,
    server_command,
    server_environ,
)
from demo.server import Server, ServerError, stop_on_terminate

_COMMANDS = """
The server is up on {url} with spans on. Try, in another terminal:

1. Ask about eight documents, then about the same documents in reversed order:

   curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @{first}
   curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @{reversed}

2. See how the second request is cut into pieces, and what of it is cached:

   {program} explain --url {url} {reversed}

3. See how many tokens were reused so far, and how many were computed:

   curl -s {url}/metrics | grep '^vllm_spans_.*tokens_total'

Ctrl-C stops the server.
"""


def write_requests(folder: Path, documents: Sequence[Document]) -> tuple[Path, Path]:
    """Write two request bodies: the documents as they are, and in reversed order.

    Args:
        folder: Where to write them.
        documents: The documents.

    Returns:
        The paths of both files.
    """
    paths = (folder / "first.json", folder / "reversed.json")
    for path, order in zip(paths, (documents, list(reversed(documents))), strict=True):
        body = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 32,
            "documents": [dataclasses.asdict(document) for document in order],
            "messages": [{"role": "user", "content": QUESTION}],
        }
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return paths


def main() -> int:
    """Serve until interrupted; returns the exit status."""
    port = int(os.environ.get("PORT", "8000"))
    print(f"Starting the server with {MODEL} on port {port}", flush=True)
    server = Server(server_command(port), port, environ=server_environ())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="vllm_spans-serve-") as folder,
            stop_on_terminate(),
            server,
        ):
            progress = Progress()
            progress.done(server.wait_ready(progress))
            first, other = write_requests(Path(folder), load_documents())
            program = os.path.relpath(Path(sys.executable).with_name("vllm-spans"))
            print(
                _COMMANDS.format(url=server.url, first=first, reversed=other, program=program),
                flush=True,
            )
            return server.wait()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 0
    except ServerError as error:
        print(f"\n{error}; if port {port} is taken, use another: make serve PORT=8001", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
