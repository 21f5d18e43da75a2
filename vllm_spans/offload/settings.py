"""OffloadSettings: what an operator can set in ``kv_connector_extra_config``, and how it is checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_spans.sizes import parse_size

_STAGING = 256 * 1024**2
_POLICIES = ("lru", "arc")


class OffloadSettingsError(ValueError):
    """A setting is unknown or cannot be used; the text names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class OffloadSettings:
    """Settings of the tiers.

    Attributes:
        cpu_memory: Bytes of the CPU tier.
        files: Folder of the file tier, ``None`` for none.
        files_limit: Most bytes in the folder, ``None`` for no limit.
        policy: Eviction in CPU memory, ``lru`` or ``arc``.
        load_timeout: Seconds that a request waits for files.
        file_threads: Threads that read and write files.
    """

    cpu_memory: int
    files: Path | None = None
    files_limit: int | None = None
    policy: str = "lru"
    load_timeout: float = 5.0
    file_threads: int = 4

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> OffloadSettings:
        """Read and check the settings.

        Args:
            extra: vLLM's ``kv_connector_extra_config``.

        Raises:
            OffloadSettingsError: An unknown key, or a value that cannot be used.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in extra:
            if name not in known:
                raise OffloadSettingsError(
                    f"kv_connector_extra_config has the unknown key {name!r}. Known: {', '.join(known)}."
                )
        given = {name: value for name, value in extra.items() if value is not None}
        values: dict[str, Any] = {}
        for name in ("cpu_memory", "files_limit"):
            if name in given:
                values[name] = _checked_size(name, given[name])
        if "files" in given:
            values["files"] = _folder(given["files"])
        if "files_limit" in values and "files" not in values:
            raise OffloadSettingsError("files_limit is set without files; set both or neither.")
        if "cpu_memory" not in values:
            if "files" not in values:
                raise OffloadSettingsError(
                    "no tier is configured: set cpu_memory (for example '4GiB'), files (a folder), or both."
                )
            values["cpu_memory"] = _STAGING
        if "policy" in given:
            if given["policy"] not in _POLICIES:
                raise OffloadSettingsError(
                    f"policy {given['policy']!r} is not known. Use one of {', '.join(_POLICIES)}."
                )
            values["policy"] = given["policy"]
        if "load_timeout" in given:
            timeout = given["load_timeout"]
            if type(timeout) not in (int, float) or not 0 < timeout < math.inf:
                raise OffloadSettingsError(
                    f"load_timeout {timeout!r} must be a positive number of seconds."
                )
            values["load_timeout"] = float(timeout)
        if "file_threads" in given:
            threads = given["file_threads"]
            if type(threads) is not int or not 1 <= threads <= 256:
                raise OffloadSettingsError(
                    f"file_threads {threads!r} must be a whole number from 1 to 256."
                )
            values["file_threads"] = threads
        return cls(**values)


def _checked_size(name: str, value: Any) -> int:
    if type(value) not in (int, str):
        raise OffloadSettingsError(f"{name} {value!r} must be a size such as '4GiB'.")
    try:
        return parse_size(value)
    except ValueError as error:
        raise OffloadSettingsError(f"{name}: {error}.") from None


def _folder(value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise OffloadSettingsError(f"files {value!r} must be the path of a folder.")
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise OffloadSettingsError(
            f"files {value!r} must be an absolute path: engine processes may run in other folders."
        )
    if path.exists() and not path.is_dir():
        raise OffloadSettingsError(f"files {value!r} is not a folder.")
    return path
