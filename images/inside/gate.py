"""Runs inside an engine image while it is built, and fails the build where the engine would fail or misbehave later.

``gate.py PATCH_SET``: the hash that the image's label will tell.
"""

from __future__ import annotations

import importlib
import os
import sys

os.environ["VLLM_V1_SPANS_ENABLED"] = "1"

MODULES = (
    "vllm_spans.core.scheduler",
    "vllm_spans.markup.rendering",
    "vllm_spans.metrics.logger",
    "vllm_spans.offload.connector",
)
# Without a driver a CUDA build cannot load its kernels, so its worker is imported on a GPU only.
CPU_MODULES = ("vllm_spans.attention.worker", "vllm_spans.attention.cpu_backend")


def main() -> int:
    """Check vLLM's version and patched symbols, apply the patches, import what the engine will."""
    from vllm_spans.patches import stock
    from vllm_spans.plugin import register

    try:
        stock.check()
    except stock.StockError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 1
    wanted, found = sys.argv[1], stock.patch_set_hash()
    if wanted != found:
        print(
            f"gate: the label says patch set {wanted or '(nothing)'}, the package has {found}; "
            "build with `python -m images.build`, which passes PATCH_SET",
            file=sys.stderr,
        )
        return 1
    register()

    from vllm.platforms import current_platform

    for name in (*MODULES, *(CPU_MODULES if current_platform.is_cpu() else ())):
        importlib.import_module(name)
    print(f"gate: patch set {found} fits the installed vLLM")
    return 0


if __name__ == "__main__":
    sys.exit(main())
