"""Prevents the parts that decide what a number means from depending on locust, gevent, or an engine."""

import subprocess
import sys

PURE = [
    "sse",
    "outcome",
    "stream",
    "arrivals",
    "fields",
    "prompts",
    "texts",
    "forms",
    "reuse",
    "workloads",
    "dry_run",
    "fake_plan",
    "fake_server",
]


def test_the_pure_parts_import_neither_locust_nor_gevent() -> None:
    script = (
        "import sys\n"
        + "".join(f"import loadtests.{name}\n" for name in PURE)
        + "found = {'locust', 'gevent', 'torch', 'vllm', 'vllm_spans'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
