"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, **{f"{u}b": 1000**i for i, u in enumerate("kmgt", 1)}}
_UNITS |= {f"{u}ib": 1024**i for i, u in enumerate("kmgt", 1)}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``4GiB``, ``200GB`` or ``1048576``.

    Raises:
        ValueError: It is not a positive size.
    """
    if type(text) is int:
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{text!r} is not a size such as 4GiB, 200GB or 1048576")
        size = int(float(match[1]) * unit)
    if size <= 0:
        raise ValueError(f"{text!r} is not a positive size")
    return size


def format_size(size: int) -> str:
    """A size for people, such as ``1.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
