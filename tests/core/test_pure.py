"""Prevents the pure core from growing a dependency on torch or vllm."""

import subprocess
import sys

PURE = ("config", "core.layout", "core.policy", "core.hashing", "core.plan", "offload.cost")


def test_the_pure_core_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys\n"
        + "".join(f"import vllm_spans.{name}\n" for name in PURE)
        + "assert not {'torch', 'vllm'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
