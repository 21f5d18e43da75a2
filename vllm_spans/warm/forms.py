"""The request that holds documents in the form in which later requests will hold them; pure.

A span's key is made of its tokens, and these depend on the form: `documents` writes a document's title and a frame
around it, a content part takes the line end behind it, text between delimiters stays as it is. What stands
outside the spans does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vllm_spans.warm.corpus import Document

FormName = Literal["documents", "part", "text"]
FORMS: tuple[str, ...] = get_args(FormName)

# A span is never the first or last text of the message: templates trim there, and the last piece is not padded.
_BEFORE = "Documents:"
_AFTER = "Reply with OK."
_COMPANION = "-"


@dataclass(frozen=True, slots=True)
class Form:
    """How documents are put into requests.

    Attributes:
        name: ``documents`` (the request's field), ``part`` (a content part with ``"span": true``) or ``text``
            (between delimiters).
        model: The model's name, or that of a LoRA adapter.
        delimiter: The server's, for ``text``.
        cache_salt: The tenant's salt.
        alone: Send each document by itself. Else it always has another one beside it in the form ``documents``:
            what a template that renders them itself writes around each belongs to the spans only where there are
            two or more.
    """

    name: FormName
    model: str
    delimiter: str | None = None
    cache_salt: str | None = None
    alone: bool = False

    def problem(self, document: Document) -> str | None:
        """Why a document cannot take this form; ``None`` when it can."""
        border, text = self.delimiter, document.text
        if self.name == "text" and border and f"{text}{border}".split(border) != [text, ""]:
            return f"its text runs into the delimiter {border!r}"
        return None

    def can_share(self, one: Document, two: Document) -> bool:
        """Whether two documents may be in one request without changing each other's tokens."""
        # A frame that not all documents have is not theirs.
        same_frame = self.name != "documents" or (one.title is None) == (two.title is None)
        return same_frame and not self.alone

    def body(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Body of a chat completion whose first spans are the documents, in order.

        Args:
            documents: One or more that can share a request.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": 1,
            "temperature": 0,
            # Without gaps every block of a span is its own, and so is computed and published.
            "spans": {"gap_policy": "none"},
        }
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
        content: Any = _AFTER
        if self.name == "documents":
            body["documents"] = [_document(document.text, document.title) for document in documents]
            if len(documents) == 1 and not self.alone:
                title = None if documents[0].title is None else _COMPANION
                body["documents"].append(_document(_COMPANION, title))
        elif self.name == "part":
            content = [{"type": "text", "text": _BEFORE}]
            content += [
                {"type": "text", "text": document.text, "span": True} for document in documents
            ]
            content.append({"type": "text", "text": _AFTER})
        else:
            texts = [_BEFORE + "\n", *(document.text for document in documents), _AFTER]
            content = (self.delimiter or "").join(texts)
        return {**body, "messages": [{"role": "user", "content": content}]}


def _document(text: str, title: str | None) -> dict[str, str]:
    return {"text": text} if title is None else {"title": title, "text": text}
