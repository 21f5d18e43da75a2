"""Fetch the tools and print where they are: ``python -m tests.tooling``."""

from __future__ import annotations

import sys

from tests.tooling import ToolError, helm, kubectl


def main() -> int:
    """Fetch every tool that is missing.

    Returns:
        The exit status.
    """
    try:
        for name, path in (("helm 3", helm(3)), ("helm 4", helm(4)), ("kubectl", kubectl())):
            print(f"{name:8} {path}")
    except ToolError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
