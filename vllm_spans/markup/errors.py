"""MarkupError: what is wrong with the markup of a request."""

from __future__ import annotations


class MarkupError(ValueError):
    """A request whose span markup cannot be served; it becomes an HTTP 400.

    Args:
        message: What is wrong and what to do instead.
        param: The part of the request at fault, in the request's own words
            (``messages[2].content[0].span``).
        reason: Label of the rejection counter, one of a small fixed set.
    """

    def __init__(self, message: str, param: str, reason: str) -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason
