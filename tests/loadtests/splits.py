"""Bytes cut anywhere."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Pieces of ``data``, some of them empty; joined they are ``data``."""
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    borders = [0, *places, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]
