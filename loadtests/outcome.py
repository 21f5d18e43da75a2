"""How a request can end; pure."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """The class of a request's end. Everything but ``OK`` is an error.

    The first cause wins: a stream that carries broken JSON and then ends early is ``BAD_JSON``.
    """

    OK = "ok"
    # The connection
    CONNECTION = "connection"  # no connection, or it broke before the response's head
    CUT_OFF = "cut_off"  # it broke inside the body
    # The status
    HTTP_429 = "http_429"
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    HTTP_OTHER = "http_other"
    NOT_A_STREAM = "not_a_stream"  # 200 with another content type
    # The time
    NO_FIRST_TOKEN = "no_first_token"  # none within the limit
    STALL = "stall"  # tokens stopped for longer than the limit
    TOO_LONG = "too_long"  # the whole answer took longer than the limit
    # The content
    BAD_UTF8 = "bad_utf8"
    BAD_JSON = "bad_json"
    BAD_EVENT = "bad_event"  # JSON that is no chunk of an answer, or an event after [DONE]
    ERROR_EVENT = "error_event"  # the server says so inside the stream
    NO_DONE = "no_done"  # the body ended in order, but without [DONE]
    NO_FINISH = "no_finish"  # no finish_reason
    NO_USAGE = "no_usage"
    EMPTY = "empty"  # nothing visible
    # The generator
    CANCELLED = "cancelled"  # the run was ended (Ctrl-C) while it was in flight
    LOST = "lost"  # sent, but its worker died before it ended
    NOT_SENT = "not_sent"  # planned, but the run or its worker ended before


def of_status(status: int) -> Outcome | None:
    """The class of an HTTP status; ``None`` for 200."""
    if status == 200:
        return None
    if status == 429:
        return Outcome.HTTP_429
    if 400 <= status < 500:
        return Outcome.HTTP_4XX
    return Outcome.HTTP_5XX if 500 <= status < 600 else Outcome.HTTP_OTHER
