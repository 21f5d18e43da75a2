"""The entry point: everything that is registered with vLLM, in one screen.

vLLM calls ``register`` in every process (API server, engine core, workers). Without ``VLLM_V1_SPANS_ENABLED=1`` it
does nothing at all.
"""

from __future__ import annotations

import logging
import os

from vllm_spans.config import SpansConfig, spans_enabled

logger = logging.getLogger(__name__)


def register() -> None:
    """Install spans into this process's vLLM.

    vLLM logs and swallows what a plugin raises while it is loaded, but not what ``register`` raises: a setting that
    cannot be used stops the start.

    Raises:
        SpansConfigError: A ``VLLM_V1_SPANS_*`` variable is unknown or has an unusable value.
        GateError: The installed vLLM is not the one that the patches know.
    """
    if not spans_enabled(os.environ):
        return
    SpansConfig.from_sources(os.environ)

    import vllm.version

    from vllm_spans.gate import check_version

    check_version(vllm.version.__version__)

    from vllm_spans import patches

    _log_with_vllm()
    patches.apply()


def _log_with_vllm() -> None:
    """Let our log lines go where vLLM's go: it configures the logger ``vllm`` alone.

    It does so after plugins are loaded, and again when an engine names other settings.
    """
    logging.getLogger("vllm_spans").parent = logging.getLogger("vllm")
