"""Leave the server with the embedded model up in the foreground: what `make serve` runs."""

import os
import sys
from pathlib import Path

from demo.__main__ import MODEL, Progress, server_command, server_environ
from demo.server import Server, ServerError, stop_on_terminate

_COMMANDS = """
The server is up on {url} with spans on. Try, in another terminal:

1. Ask about two documents. Send it twice, the second time with the documents swapped:

  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "max_tokens": 32, "temperature": 0,
    "documents": [
      {{"title": "Depot", "text": "The depot in Ulm opens at six. Its manager is Ada Brandt."}},
      {{"title": "Yard", "text": "The yard in Bonn is closed on Mondays. It has two cranes."}}],
    "messages": [{{"role": "user", "content": "Who manages the depot?"}}]}}'

2. See how such a request is cut into pieces and spans:

{explain}

3. See how much was reused:

  curl -s {url}/metrics | grep '^vllm_spans_'

Ctrl-C stops the server.
"""
_EXPLAIN = """\
  {program} explain --help"""


def main() -> int:
    """Serve until interrupted; returns the exit status."""
    port = int(os.environ.get("PORT", "8000"))
    print(f"Starting the server with {MODEL} on port {port}", flush=True)
    server = Server(server_command(port), port, environ=server_environ())
    try:
        with stop_on_terminate(), server:
            server.wait_ready(Progress())
            program = Path(sys.executable).with_name("vllm-spans")
            explain = _EXPLAIN.format(program=os.path.relpath(program), url=server.url)
            print(_COMMANDS.format(url=server.url, model=MODEL, explain=explain), flush=True)
            return server.wait()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 0
    except ServerError as error:
        print(f"\n{error}; if port {port} is taken, use another: make serve PORT=8001", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
