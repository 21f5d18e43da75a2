"""The forms in which a turn becomes a request (docs/markup.md); pure.

Every form can leave its marks out: stock vLLM then gets the same text as the server with spans. In the form
``offsets`` it gets the very same tokens, pads included.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests.prompts import Message, Piece, Turn

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
FORMS = ("parts", "documents", "delimiter", "text", "offsets")


@dataclass(frozen=True)
class Form:
    """How turns become requests.

    Attributes:
        name: ``parts``: chat, content parts with ``"span": true``. ``documents``: chat, the spans of user messages in
            the field ``documents``, others as parts. ``delimiter``: chat, strings with a delimiter. ``text``:
            completion of a string with a delimiter. ``offsets``: completion of token ids with their offsets.
        model: The model's name.
        marked: Whether spans are marked; not for stock vLLM.
        delimiter: The server's, for ``delimiter`` and ``text``.
        block_size: The server's, for ``offsets``.
        vocabulary: Least and greatest token id, for ``offsets``; the least one is the pad.
        gap_policy: Policy that requests ask for; ``None``: the server's.
        gap_length: Its k in tokens; ``None``: the server's.
        ignore_eos: Let every answer have exactly its ``max_tokens``.
        temperature: Of sampling.
        extra: Further keys of every body.
    """

    name: str
    model: str
    marked: bool = True
    delimiter: str = "<|span|>"
    block_size: int = 32
    vocabulary: tuple[int, int] = (1000, 30000)
    gap_policy: str | None = None
    gap_length: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        """Path and body of a turn's request."""
        body: dict[str, Any] = {
            **self.extra,
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": turn.max_tokens,
            "temperature": self.temperature,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        options = {"gap_policy": self.gap_policy, "gap_length": self.gap_length}
        options = {name: value for name, value in options.items() if value is not None}
        if options and self.marked and turn.spans:
            body["spans"] = options
        if self.name in ("text", "offsets"):
            return COMPLETIONS_PATH, body | self._completion(turn)
        return CHAT_PATH, body | self._chat(turn)

    # -- chat -----------------------------------------------------------------------------------

    def _chat(self, turn: Turn) -> dict[str, Any]:
        messages: Sequence[Message] = turn.messages
        documents: list[dict[str, str]] = []
        if self.name == "documents":
            spans = [p for m in messages if m.role == "user" for p in m.pieces if p.is_span]
            if self.marked:
                documents = [_document(piece) for piece in spans]
                spans = []
            messages = _without_user_spans(messages, spans)
        body: dict[str, Any] = {"messages": [self._message(message) for message in messages]}
        if documents:
            body["documents"] = documents
        return body

    def _message(self, message: Message) -> dict[str, Any]:
        written: dict[str, Any] = {"role": message.role, "content": self._content(message.pieces)}
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            written["tool_call_id"] = message.tool_call_id
        return written

    def _content(self, pieces: Sequence[Piece]) -> str | list[dict[str, Any]]:
        if self.name == "delimiter":
            return self._delimited(pieces)
        if not any(piece.is_span for piece in pieces):
            return "".join(piece.text for piece in pieces)
        parts: list[dict[str, Any]] = []
        for piece in pieces:
            part: dict[str, Any] = {"type": "text", "text": piece.text}
            if piece.is_span and self.marked:
                part["span"] = True
            parts.append(part)
        return parts

    def _delimited(self, pieces: Sequence[Piece]) -> str:
        if not self.marked:
            return "".join(piece.text for piece in pieces)
        last = max((i for i, piece in enumerate(pieces) if piece.is_span), default=-1)
        written: list[str] = []
        after_span = False
        for index, piece in enumerate(pieces):
            if piece.is_span:
                written += [self.delimiter, piece.text]
            elif after_span:
                # Two borders with nothing between them end a span for good; the last one needs no second border.
                written += [self.delimiter * (1 if index > last else 2), piece.text]
            else:
                written.append(piece.text)
            after_span = piece.is_span
        if after_span:
            written.append(self.delimiter)
        return "".join(written)

    # -- completions ----------------------------------------------------------------------------

    def _completion(self, turn: Turn) -> dict[str, Any]:
        pieces = list(turn.pieces())
        if self.name == "text":
            return {"prompt": self._delimited(pieces)}
        prompt: list[int] = []
        starts: dict[bool, list[int]] = {True: [], False: []}
        pads = 0
        runs = list(_runs(pieces))
        for index, run in enumerate(runs):
            is_span = run[0].is_span
            if is_span or starts[True]:
                starts[is_span].append(len(prompt))
            prompt += [token for piece in run for token in self.tokens(piece.text)]
            if turn.spans and index < len(runs) - 1:
                missing = -len(prompt) % self.block_size
                prompt += [self.vocabulary[0]] * missing
                pads += missing
        body: dict[str, Any] = {"prompt": prompt}
        if self.marked and starts[True]:
            arguments: dict[str, Any] = {"span_starts": starts[True]}
            if starts[False]:
                arguments["cross_span_starts"] = starts[False]
            body["vllm_xargs"] = {**arguments, "span_pad_tokens": pads}
        return body

    def tokens(self, text: str) -> list[int]:
        """Token ids that stand for a text in the form ``offsets``: one per word, the same for the same word."""
        low, high = self.vocabulary
        return [low + 1 + zlib.crc32(word.encode()) % (high - low) for word in text.split()]


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Each span alone; ordinary pieces together, up to the next span."""
    for is_span, found in itertools.groupby(pieces, lambda piece: piece.is_span):
        if is_span:
            yield from ([piece] for piece in found)
        else:
            yield list(found)


def _document(piece: Piece) -> dict[str, str]:
    return (
        {"text": piece.text} if piece.title is None else {"title": piece.title, "text": piece.text}
    )


def _without_user_spans(messages: Sequence[Message], shown: Sequence[Piece]) -> list[Message]:
    """Take the spans out of user messages; write ``shown`` in front of the last one, as the server would."""
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    result = []
    for index, message in enumerate(messages):
        if message.role == "user":
            pieces = [piece for piece in message.pieces if not piece.is_span]
            if index == last:
                pieces = [Piece(_context_block(piece)) for piece in shown] + pieces
            message = Message(message.role, tuple(pieces))
        result.append(message)
    return result


def _context_block(piece: Piece) -> str:
    title = f" {piece.title}" if piece.title is not None else ""
    return f"Document:{title}\n{piece.text}\n\n"
