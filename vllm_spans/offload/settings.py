"""OffloadSettings: what an operator can set in ``kv_connector_extra_config``, and how it is checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_spans.offload.cost import CostModel
from vllm_spans.sizes import parse_size

_STAGING = 256 * 1024**2
_POLICIES = ("lru", "arc")
_LOAD_WHEN = ("cheaper", "always")
_RATES = ("cpu_bandwidth", "file_bandwidth", "recompute_tokens_per_second")


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
        load_when: ``cheaper``: what is faster to load than to compute. ``always``: all that is found.
        cpu_bandwidth: Bytes per second from CPU memory into the KV cache, ``None`` to measure it.
        file_bandwidth: Bytes per second from files into CPU memory, ``None`` to measure it.
        recompute_tokens_per_second: What the engine computes, ``None`` to measure it.
    """

    cpu_memory: int
    files: Path | None = None
    files_limit: int | None = None
    policy: str = "lru"
    load_timeout: float = 5.0
    file_threads: int = 4
    load_when: str = "cheaper"
    cpu_bandwidth: int | None = None
    file_bandwidth: int | None = None
    recompute_tokens_per_second: float | None = None

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
        for name in ("cpu_memory", "files_limit", "cpu_bandwidth", "file_bandwidth"):
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
        for name, choices in (("policy", _POLICIES), ("load_when", _LOAD_WHEN)):
            if name in given:
                if given[name] not in choices:
                    raise OffloadSettingsError(
                        f"{name} {given[name]!r} is not known. Use one of {', '.join(choices)}."
                    )
                values[name] = given[name]
        for name, unit in (("load_timeout", "seconds"), ("recompute_tokens_per_second", "tokens")):
            if name in given:
                values[name] = _checked_number(name, given[name], unit)
        if "file_threads" in given:
            threads = given["file_threads"]
            if type(threads) is not int or not 1 <= threads <= 256:
                raise OffloadSettingsError(
                    f"file_threads {threads!r} must be a whole number from 1 to 256."
                )
            values["file_threads"] = threads
        _check_rates(values)
        return cls(**values)

    def make_cost_model(self, block_tokens: int, block_bytes: int) -> CostModel | None:
        """What decides on loads; ``None`` where all that is found is loaded.

        Args:
            block_tokens: Tokens per block.
            block_bytes: Bytes per block.
        """
        if self.load_when == "always":
            return None
        return CostModel(
            block_tokens,
            block_bytes,
            self.cpu_bandwidth,
            self.file_bandwidth,
            self.recompute_tokens_per_second,
        )


def _checked_size(name: str, value: Any) -> int:
    if type(value) not in (int, str):
        raise OffloadSettingsError(f"{name} {value!r} must be a size such as '4GiB'.")
    try:
        return parse_size(value)
    except ValueError as error:
        raise OffloadSettingsError(f"{name}: {error}.") from None


def _checked_number(name: str, value: Any, unit: str) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise OffloadSettingsError(f"{name} {value!r} must be a positive number of {unit}.")
    return float(value)


def _check_rates(values: Mapping[str, Any]) -> None:
    """Refuse rates that nothing would be decided by.

    Raises:
        OffloadSettingsError: Naming the rate.
    """
    given = [name for name in _RATES if name in values]
    if given and values.get("load_when") == "always":
        raise OffloadSettingsError(
            f"{given[0]} has no effect with load_when 'always': drop it, or set load_when to 'cheaper'."
        )
    if "file_bandwidth" in values and "files" not in values:
        raise OffloadSettingsError("file_bandwidth is set without files; set both or neither.")


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
