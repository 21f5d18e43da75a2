"""Prevents: a size that is read or told as another one."""

from __future__ import annotations

import pytest

from vllm_spans.sizes import format_size, parse_size


def test_sizes_are_read() -> None:
    assert [parse_size(t) for t in ("1", "2 KB", "2kib", "3GiB")] == [1, 2000, 2048, 3 * 1024**3]
    for text in ("", "0", "-1GiB", "4 gigs", "GiB"):
        with pytest.raises(ValueError, match="size"):
            parse_size(text)


def test_sizes_are_told() -> None:
    sizes = (0, 1023, 1024, 1536, 1536 * 1024, 3 * 2**30, 5 * 2**40, 5000 * 2**40)
    assert [format_size(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.5 MiB",
        "3.0 GiB",
        "5.0 TiB",
        "5000.0 TiB",
    ]
