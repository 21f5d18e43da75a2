"""The embedded default model: SmolLM2-135M-Instruct, fetched by pin and converted once."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vllm_spans.embedded.convert import ConvertError, convert
from vllm_spans.embedded.fetch import GGUF_SHA256, FetchError, fetch_gguf

__all__ = [
    "MODEL_NAME",
    "ConvertError",
    "FetchError",
    "cache_dir",
    "ensure_model",
]

logger = logging.getLogger(__name__)

MODEL_NAME = "SmolLM2-135M-Instruct"
# Raised whenever a conversion writes other files than before, so that old folders are not reused.
_FORMAT = 1
_MARKER = "vllm_spans.json"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder that holds what this package downloads and converts.

    Args:
        environ: Environment to read instead of the process's own.

    Returns:
        ``VLLM_SPANS_CACHE``, else ``vllm_spans`` under ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    environ = os.environ if environ is None else environ
    if explicit := environ.get("VLLM_SPANS_CACHE"):
        return Path(explicit).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm_spans"


def ensure_model(cache: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Return the embedded model's folder in Hugging Face form, making it on first use.

    Processes that call this at once wait for the first: one of them fetches and converts. The
    folder appears under its name only when it is complete.

    Args:
        cache: Folder to keep it in; ``cache_dir()`` when left out.
        progress: Called with a line of text before each slow step; logged at INFO when left out.

    Returns:
        A folder with config.json, model.safetensors (float32) and the tokenizer.

    Raises:
        FetchError: The model could not be downloaded, or it is not the pinned file.
        ConvertError: The downloaded file is not one that the converter handles.
    """
    cache = cache_dir() if cache is None else cache
    report = progress or (lambda line: logger.info("%s", line))
    target = cache / "models" / MODEL_NAME
    if _is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".lock", report):
        if _is_complete(target):  # another process made it while this one waited
            return target
        gguf = fetch_gguf(cache / "downloads", report)
        report(f"converting {MODEL_NAME} to float32 (once, about 540 MB)")
        scratch = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
        try:
            convert(gguf, scratch)
            (scratch / _MARKER).write_text(json.dumps(_marker()) + "\n", encoding="utf-8")
            scratch.chmod(0o755)
            if target.exists():  # incomplete, or written by another version of the converter
                shutil.rmtree(target)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    report(f"{MODEL_NAME} is ready in {target}")
    return target


def _marker() -> dict[str, object]:
    return {"format": _FORMAT, "source_sha256": GGUF_SHA256}


def _is_complete(folder: Path) -> bool:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(marker == _marker()) and (folder / "model.safetensors").is_file()


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that prepares the embedded model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when the process dies
