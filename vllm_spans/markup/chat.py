"""Forms 1 to 3 in a chat request: which texts of it are spans; pure.

`ChatMarkup` holds the request's messages without markup (what the plain rendering is made of) and can
write the same messages with sentinels around the spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_spans.markup.delimiter import split_delimited
from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.sentinels import Sentinels, SpanSource

SPAN_ROLES = ("system", "developer", "user", "tool")
SPAN_PART_TYPES = ("text", "input_text")
_PLAIN_PART_TYPES = (*SPAN_PART_TYPES, None)

Messages = list[dict[str, Any]]
# Ordinary text, or the number of a span.
_Segment = str | int


def has_chat_markup(
    messages: Sequence[Any], documents: Sequence[Any] | None, delimiter: str | None
) -> bool:
    """Whether anything in a chat request is marked; cheap, for every request."""
    if documents:
        return True
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        if isinstance(content, str):
            if delimiter and delimiter in content and message.get("role") in SPAN_ROLES:
                return True
        elif isinstance(content, (list, tuple)):
            for part in content:
                if isinstance(part, Mapping):
                    flag = part.get("span")
                    if flag is not None and flag is not False:
                        return True
                    part = part.get("text")
                if (
                    delimiter
                    and isinstance(part, str)
                    and delimiter in part
                    and message.get("role") in SPAN_ROLES
                ):
                    return True
    return False


class ChatMarkup:
    """The spans of one chat request.

    Args:
        messages: The request's messages.
        documents: The request's ``documents``.
        delimiter: The configured delimiter.
        path: The part of the request that the messages are, for errors.

    Raises:
        MarkupError: Markup where there can be none, or a document without text.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Mapping[str, Any]] | None,
        delimiter: str | None,
        path: str = "messages",
    ) -> None:
        self.sources: list[SpanSource] = []
        self._path = path
        self._delimiter = delimiter
        self._documents = [dict(document) for document in documents or ()]
        self._document_range = range(0)
        for index, document in enumerate(self._documents):
            text = document.get("text")
            if not isinstance(text, str) or not text.strip():
                raise MarkupError(
                    "a document needs a text", f"documents[{index}].text", "empty_span"
                )
            self._add(text, f"documents[{index}]", "documents")
        self._document_range = range(len(self._documents))
        self._messages = [
            self._message(message, f"{path}[{index}]") for index, message in enumerate(messages)
        ]

    def _add(self, text: str, param: str, group: str, *, is_part: bool = False) -> int:
        if not text.strip():
            raise MarkupError(
                "the span has no text but white space; leave it out", param, "empty_span"
            )
        self.sources.append(SpanSource(text, param, group, is_part))
        return len(self.sources) - 1

    @property
    def has_documents(self) -> bool:
        """Whether the request has documents."""
        return bool(self._documents)

    @property
    def document_spans(self) -> range:
        """Numbers of the spans that are documents."""
        return self._document_range

    def documents(self, sentinels: Sentinels | None) -> list[dict[str, Any]] | None:
        """The documents for the template, with sentinels if given."""
        if not self._documents:
            return None
        if sentinels is None:
            return self._documents
        marked = []
        for index, document in enumerate(self._documents):
            document = {**document, "text": sentinels.mark(document["text"], index)}
            title = document.get("title")
            if isinstance(title, str):
                document["title"] = sentinels.mark_title(title, index)
            marked.append(document)
        return marked

    def use_context_block(self) -> None:
        """Write the documents into the last user message, for a template that leaves them out.

        They stand in front of the message's own text: many templates refuse a message of their own
        there. Title, text and separator of a document lie in its span and the spans touch.

        Raises:
            MarkupError: There is no user message.
        """
        for message in reversed(self._messages):
            if message.get("role") == "user":
                break
        else:
            raise MarkupError(
                "the model's chat template does not render documents, and there is no user message "
                "to put them into",
                "documents",
                "template",
            )
        block: list[_Segment] = []
        for index, document in enumerate(self._documents):
            title = document.get("title")
            head = f"Document: {title.strip()}\n" if title and title.strip() else "Document:\n"
            text = f"{head}{document['text']}\n\n"
            self.sources[index] = SpanSource(text, f"documents[{index}]", "documents")
            block.append(index)
        self._documents = []
        content = message.get("content")
        if not isinstance(content, list):
            message["content"] = _Marked([*block, *_segments(content)])
        elif content and isinstance(content[0], dict) and not _is_span_part(content[0]):
            # In the same part as the text behind it, or vLLM would join them with a line end.
            first = _Marked([*block, *_segments(content[0].get("text"))])
            message["content"] = [{**content[0], "text": first}, *content[1:]]
        else:
            message["content"] = [{"type": "text", "text": _Marked(block)}, *content]

    def messages(self, sentinels: Sentinels | None) -> Messages:
        """The messages, with sentinels around spans if given; a fresh copy where they had markup."""
        return [self._write_message(message, sentinels) for message in self._messages]

    def _message(self, message: Mapping[str, Any], path: str) -> dict[str, Any]:
        content = message.get("content")
        role = message.get("role")
        message = dict(message)
        if isinstance(content, str):
            message["content"] = self._text(content, role, f"{path}.content")
        elif isinstance(content, (list, tuple)):
            message["content"] = [
                self._part(part, role, f"{path}.content[{index}]")
                for index, part in enumerate(content)
            ]
        return message

    def _part(self, part: Any, role: Any, path: str) -> Any:
        if isinstance(part, str):
            return self._text(part, role, path)
        if not isinstance(part, Mapping):
            return part
        flag = part.get("span")
        part = {key: value for key, value in part.items() if key != "span"}
        if flag is None or flag is False:
            if isinstance(part.get("text"), str) and part.get("type") in _PLAIN_PART_TYPES:
                part["text"] = self._text(part["text"], role, f"{path}.text")
            return part
        param = f"{path}.span"
        if flag is not True:
            raise MarkupError(f"span must be true or false, not {flag!r}", param, "bad_option")
        if role not in SPAN_ROLES:
            raise MarkupError(
                f"a message of the role {role!r} cannot hold a span; roles that can: "
                f"{', '.join(SPAN_ROLES)}",
                param,
                "role",
            )
        if part.get("type") not in SPAN_PART_TYPES or not isinstance(part.get("text"), str):
            raise MarkupError(
                f"a content part of the type {part.get('type')!r} cannot be a span, only text can",
                param,
                "unsupported",
            )
        part["text"] = _Marked([self._add(part["text"], param, self._path, is_part=True)])
        return part

    def _text(self, text: str, role: Any, param: str) -> Any:
        # The model's own turns may quote the delimiter without meaning it.
        if not self._delimiter or role not in SPAN_ROLES or self._delimiter not in text:
            return text
        return _Marked(
            [
                self._add(piece.text, param, self._path) if piece.is_span else piece.text
                for piece in split_delimited(text, self._delimiter, param)
            ]
        )

    def _write_message(
        self, message: dict[str, Any], sentinels: Sentinels | None
    ) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, _Marked):
            return {**message, "content": self._write(content, sentinels)}
        if isinstance(content, list):
            return {**message, "content": [self._write_part(part, sentinels) for part in content]}
        return dict(message)

    def _write_part(self, part: Any, sentinels: Sentinels | None) -> Any:
        if isinstance(part, _Marked):
            return self._write(part, sentinels)
        if isinstance(part, dict):
            text = part.get("text")
            if isinstance(text, _Marked):
                return {**part, "text": self._write(text, sentinels)}
            return dict(part)
        return part

    def _write(self, marked: _Marked, sentinels: Sentinels | None) -> str:
        return "".join(
            segment
            if isinstance(segment, str)
            else self.sources[segment].text
            if sentinels is None
            else sentinels.mark(self.sources[segment].text, segment)
            for segment in marked.segments
        )


class _Marked:
    """Text with spans in it."""

    def __init__(self, segments: list[_Segment]) -> None:
        self.segments = segments


def _segments(content: Any) -> list[_Segment]:
    return content.segments if isinstance(content, _Marked) else [content or ""]


def _is_span_part(part: dict[str, Any]) -> bool:
    text = part.get("text")
    return not (
        part.get("type") in SPAN_PART_TYPES
        and (isinstance(text, str) or (isinstance(text, _Marked) and len(text.segments) > 1))
    )
