"""Form 3: a text delimiter for clients that can send nothing but strings; pure.

A delimiter is a border. The text between two neighbouring delimiters is a span; the text before the
first and behind the last one is ordinary. Two delimiters with nothing between them end a span for
good: what follows them is ordinary up to the next delimiter::

    rules <|span|>document A<|span|>document B<|span|>question
    <|span|>document A<|span|><|span|>a remark<|span|>document B<|span|>question
"""

from __future__ import annotations

from vllm_spans.markup.errors import MarkupError
from vllm_spans.markup.pieces import TextPiece


def split_delimited(text: str, delimiter: str, param: str) -> list[TextPiece]:
    """Split a string at its delimiters.

    Args:
        text: The string.
        delimiter: The delimiter, not empty.
        param: The part of the request that the string comes from.

    Returns:
        The pieces without the delimiters; one ordinary piece when there is no delimiter.

    Raises:
        MarkupError: A single delimiter, which begins a span that nothing ends.
    """
    parts = text.split(delimiter)
    if len(parts) == 1:
        return [TextPiece(text, False, param)]
    if len(parts) == 2:
        raise MarkupError(
            f"one delimiter {delimiter!r} alone marks nothing: a span stands between two of them",
            param,
            "delimiter",
        )
    pieces = [TextPiece(parts[0], False, param)]
    spans_follow = True
    for part in parts[1:-1]:
        if spans_follow and not part:
            spans_follow = False
            continue
        pieces.append(TextPiece(part, spans_follow, param))
        spans_follow = True
    pieces.append(TextPiece(parts[-1], False, param))
    return pieces
