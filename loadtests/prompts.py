"""What a session says, before it takes the form of a request; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text.

    Attributes:
        text: The text.
        is_span: Whether it is to be marked as a span.
        title: A document's title.
    """

    text: str
    is_span: bool = False
    title: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        role: system, user, assistant or tool.
        pieces: Its text in order.
        tool_calls: Calls of an assistant's message.
        tool_call_id: The call that a tool's message answers.
    """

    role: str
    pieces: tuple[Piece, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: the whole conversation up to it.

    What the assistant said in earlier turns is scripted, not what the server answered, so that every server gets the
    same prompts and answers can be compared pair by pair.

    Attributes:
        messages: The conversation.
        max_tokens: Most tokens of the answer.
        pause: Seconds from the end of the former turn's answer to this request: thinking, or a tool at work.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    pause: float = 0.0

    def pieces(self) -> Iterator[Piece]:
        """All pieces in order."""
        return (piece for message in self.messages for piece in message.pieces)

    @property
    def spans(self) -> int:
        """How many pieces are spans."""
        return sum(piece.is_span for piece in self.pieces())


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other.

    Attributes:
        number: Its place in the workload.
        turns: At least one.
    """

    number: int
    turns: tuple[Turn, ...]


def request_id(session: int, turn: int) -> str:
    """The name under which the same request is found in the records of every server."""
    return f"{session}.{turn}"
