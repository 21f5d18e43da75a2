"""Prevents tokens from being lost, doubled or late because of where a network cuts a stream."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from loadtests.sse import SseEvent, SseParser
from tests.loadtests.splits import cuts


def parse(pieces: list[bytes]) -> tuple[list[SseEvent], int, bool]:
    parser = SseParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events, parser.comments, parser.is_inside_event


def oracle(data: bytes) -> tuple[list[SseEvent], int, bool]:
    """The format's rules on the whole stream at once."""
    text = data.removeprefix(b"\xef\xbb\xbf") if _first_line_is_whole(data) else data
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    events, comments, values, name = [], 0, [], b""
    for line in lines[:-1]:
        if line.startswith(b":"):
            comments += 1
        elif not line:
            if values:
                events.append(SseEvent(b"\n".join(values), name))
            values, name = [], b""
        else:
            field, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            if field == b"data":
                values.append(value)
            elif field == b"event":
                name = value
    return events, comments, bool(values or name or lines[-1])


def _first_line_is_whole(data: bytes) -> bool:
    # A byte order mark alone is an unfinished line.
    return b"\n" in data or b"\r" in data


LINES = st.sampled_from(
    [
        b"data: {}",
        b"data:x",
        b"data:  two spaces",
        b"data",
        b"data:",
        "data: wörd 字 😀".encode(),
        b"data: \xff\xc3",
        b"data: [DONE]",
        b": keep-alive",
        b":",
        b"event: error",
        b"id: 7",
        b"retry: 10",
        b"other",
        b"",
        b"",
        b"\xef\xbb\xbfdata: mark",
    ]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=14).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


@given(st.data(), STREAMS | st.binary(max_size=60), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_any_cut_gives_the_events_of_the_whole(
    data: st.DataObject, body: bytes, mark: bytes
) -> None:
    stream = mark + body
    assert parse(data.draw(cuts(stream))) == oracle(stream)


@given(STREAMS)
@example(b"data: a\r\n\r\ndata: b\r\n\r\n")
def test_single_bytes_give_the_events_of_the_whole(stream: bytes) -> None:
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == oracle(stream)


def test_an_event_is_there_with_the_first_byte_that_ends_it() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n") == []
    assert parser.feed(b"\r") == [SseEvent(b"a")]  # a LF may follow, and must not be waited for
    assert parser.feed(b"\ndata: b\n\n") == [SseEvent(b"b")]


def test_lines_of_data_are_joined() -> None:
    assert parse([b"data: a\ndata: b\n\n"])[0] == [SseEvent(b"a\nb")]


def test_a_lost_tail_is_seen() -> None:
    assert parse([b"data: a\n\ndata: b"])[2]
    assert parse([b"data: a\n\ndata: b\n"])[2]
    assert not parse([b"data: a\n\n: comment\n"])[2]
