"""``python -m tests.cluster.node up | down | status``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.cluster.node import Folder, NodeError, down, status, up


def main() -> int:
    """Do what the command line says.

    Returns:
        0; 1 if the node cannot be brought up or taken down, or does not run well.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("action", choices=["up", "down", "status"])
    action = parser.parse_args().action
    folder, begin = Folder(), time.monotonic()
    try:
        if action == "up":
            up(folder)
            print(f"[node] ready after {time.monotonic() - begin:.0f} s; logs: {folder.logs}")
            print(f"[node] credentials: {folder.kubeconfig}")
        elif action == "down":
            down(folder)
            print(f"[node] down after {time.monotonic() - begin:.0f} s; logs: {folder.logs}")
        else:
            states = status(folder)
            for name, state in states.items():
                print(f"{name:24} {state}")
            if not states:
                print("there is no node")
            return 0 if states.get("node") == "Ready" else 1
    except NodeError as error:
        print(f"[node] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
