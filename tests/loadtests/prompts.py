"""Random turns."""

from __future__ import annotations

from hypothesis import strategies as st

from loadtests.prompts import Message, Piece, Turn

TEXTS = st.lists(
    st.sampled_from(["red", "green", "blue", "one", "two", "three"]), min_size=1, max_size=9
)
PIECES = st.builds(
    Piece,
    TEXTS.map(" ".join),
    st.booleans(),
    st.sampled_from([None, "a title"]),
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "tool"]),
    st.lists(PIECES, min_size=1, max_size=6).map(tuple),
)
TURNS = st.builds(Turn, st.lists(MESSAGES, min_size=1, max_size=4).map(tuple), st.integers(1, 9))
