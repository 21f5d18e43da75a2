"""One streamed answer as it is read: its times, its tokens and how it ended; pure.

The machine is fed with what arrived and when. Times are seconds of one clock, on which the request was sent at
``sent``; the machine never asks for the time itself, so that a test can replay any history.

What counts as *visible*: a chunk whose delta carries text, reasoning text, or a part of a tool call that is not
empty. A chunk that only names the role, and an empty delta, show nothing and are no token. Reasoning is counted
because it is generated and shown as it comes; the first token of the answer proper is noted apart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from loadtests.outcome import Outcome, of_status
from loadtests.sse import SseEvent, SseParser

_DONE = b"[DONE]"
_EVENT_STREAM = "text/event-stream"
_DETAIL_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an answer may take, in seconds.

    Attributes:
        first_token: From sending to the first visible token.
        stall: Between two visible tokens, and from the last one to the end.
        total: From sending to the end.
    """

    first_token: float = 600.0
    stall: float = 120.0
    total: float = 3600.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own count, from the chunk that ``include_usage`` asks for.

    Attributes:
        prompt_tokens: Tokens of the prompt, pads included.
        completion_tokens: Tokens generated.
        cached_tokens: Prompt tokens whose KV was cached, if the server says so.
        pad_tokens: Prompt tokens that are pads of spans; 0 from a server without spans.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    pad_tokens: int = 0


class Answer:
    """The state of one streamed answer.

    Feed it ``head``, then ``body`` for every piece, then ``end``; or ``fail`` when the transport breaks. After every
    wait, ``expire`` tells whether a limit has passed. Once ``outcome`` is set the rest is ignored.

    Args:
        sent: Time at which sending began.
        limits: How long it may take.
    """

    def __init__(self, sent: float, limits: Limits = Limits()) -> None:
        self.sent = sent
        self.limits = limits
        self.status: int | None = None
        self.headers_at: float | None = None
        self.first_token_at: float | None = None
        self.first_answer_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self.gaps: list[float] = []
        self.chunks = 0
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.outcome: Outcome | None = None
        self.detail = ""
        self._parser = SseParser()
        self._is_done = False

    # -- what it measured -----------------------------------------------------------------------

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first visible token."""
        return None if self.first_token_at is None else self.first_token_at - self.sent

    @property
    def e2e(self) -> float | None:
        """Seconds from sending to ``[DONE]``, or to whatever ended it."""
        return None if self.ended_at is None else self.ended_at - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; ``None`` unless two or more came."""
        if self.usage is None or self.usage.completion_tokens < 2 or not self.gaps:
            return None
        return sum(self.gaps) / (self.usage.completion_tokens - 1)

    @property
    def comments(self) -> int:
        """Keep-alive comments in the stream."""
        return self._parser.comments

    # -- what arrives ---------------------------------------------------------------------------

    def head(self, now: float, status: int, content_type: str = _EVENT_STREAM) -> None:
        """Take the response's head."""
        if self.outcome is not None:
            return
        self.status = status
        self.headers_at = now
        refused = of_status(status)
        if refused is not None:
            self._close(now, refused, f"status {status}")
        elif content_type.partition(";")[0].strip().lower() != _EVENT_STREAM:
            self._close(now, Outcome.NOT_A_STREAM, f"content type {content_type!r}")

    def body(self, now: float, chunk: bytes) -> None:
        """Take bytes of the body."""
        if self.outcome is not None:
            return
        for event in self._parser.feed(chunk):
            self._event(now, event)
            if self.outcome is not None:
                return

    def end(self, now: float) -> None:
        """The body has ended in order."""
        if self.outcome is not None:
            return
        if self.headers_at is None:
            self._close(now, Outcome.CONNECTION, "ended before the response's head")
        elif not self._is_done:
            where = "inside an event" if self._parser.is_inside_event else "between events"
            self._close(now, Outcome.NO_DONE, f"ended {where} after {self.chunks} chunks")
        elif self._parser.is_inside_event:
            self._close(now, Outcome.BAD_EVENT, "bytes after [DONE]")
        else:
            self._close(self.ended_at if self.ended_at is not None else now, self._verdict(), "")

    def fail(self, now: float, detail: str) -> None:
        """The transport has failed. An answer that already had its ``[DONE]`` is complete."""
        if self._is_done:
            self.end(now)
        elif self.headers_at is None:
            self._close(now, Outcome.CONNECTION, detail)
        else:
            self._close(now, Outcome.CUT_OFF, detail)

    def cancel(self, now: float) -> None:
        """The run was ended."""
        self._close(now, Outcome.CANCELLED, "")

    # -- limits ---------------------------------------------------------------------------------

    def deadline(self) -> float:
        """The time at which ``expire`` will end it if nothing visible comes before."""
        total = self.sent + self.limits.total
        if self.last_token_at is None:
            return min(total, self.sent + self.limits.first_token)
        return min(total, self.last_token_at + self.limits.stall)

    def expire(self, now: float) -> bool:
        """Whether it is over by ``now``, because it has ended or because a limit has passed."""
        if self.outcome is None and now >= self.deadline():
            if self._is_done:  # only the connection's end is missing
                self.end(now)
            elif now >= self.sent + self.limits.total:
                self._close(now, Outcome.TOO_LONG, f"not over after {self.limits.total:g} s")
            elif self.last_token_at is None:
                limit = self.limits.first_token
                self._close(now, Outcome.NO_FIRST_TOKEN, f"nothing visible after {limit:g} s")
            else:
                limit = self.limits.stall
                self._close(now, Outcome.STALL, f"silent for {limit:g} s at chunk {self.chunks}")
        return self.outcome is not None

    # -- inside ---------------------------------------------------------------------------------

    def _close(self, now: float, outcome: Outcome, detail: str) -> None:
        if self.outcome is None:
            self.outcome, self.detail, self.ended_at = outcome, detail[:_DETAIL_LENGTH], now

    def _verdict(self) -> Outcome:
        if not self.chunks:
            return Outcome.EMPTY
        if self.finish_reason is None:
            return Outcome.NO_FINISH
        return Outcome.NO_USAGE if self.usage is None else Outcome.OK

    def _event(self, now: float, event: SseEvent) -> None:
        if self._is_done:
            self._close(now, Outcome.BAD_EVENT, "an event after [DONE]")
            return
        if event.data == _DONE:
            self._is_done = True
            self.ended_at = now
            return
        try:
            text = event.data.decode("utf-8")
        except UnicodeDecodeError as error:
            self._close(now, Outcome.BAD_UTF8, str(error))
            return
        try:
            chunk = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._close(now, Outcome.BAD_JSON, f"{error}: {text}")
            return
        if event.name == b"error" or (isinstance(chunk, dict) and chunk.get("error")):
            self._close(now, Outcome.ERROR_EVENT, text)
            return
        try:
            self._chunk(now, chunk)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._close(now, Outcome.BAD_EVENT, f"{type(error).__name__} {error}: {text}")

    def _chunk(self, now: float, chunk: dict[str, Any]) -> None:
        choices = chunk["choices"]
        if len(choices) > 1 or any(choice["index"] != 0 for choice in choices):
            raise ValueError("more answers than one")
        for choice in choices:
            shown, is_answer = _visible(choice)
            if shown:
                self._token(now, is_answer)
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
        usage = chunk.get("usage")
        if usage:
            self.usage = _usage(usage)

    def _token(self, now: float, is_answer: bool) -> None:
        self.chunks += 1
        if self.last_token_at is not None:
            self.gaps.append(now - self.last_token_at)
        else:
            self.first_token_at = now
        if is_answer and self.first_answer_at is None:
            self.first_answer_at = now
        self.last_token_at = now


def _visible(choice: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a choice shows something, and whether that is the answer rather than reasoning."""
    if "delta" not in choice:  # /v1/completions
        return bool(_text(choice["text"])), True
    delta = choice["delta"]
    if _text(delta.get("content")) or _text(delta.get("refusal")):
        return True, True
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if _text(function.get("name")) or _text(function.get("arguments")):
            return True, True
    return bool(_text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))), False


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _usage(usage: dict[str, Any]) -> Usage:
    counts = [usage["prompt_tokens"], usage["completion_tokens"], usage.get("span_pad_tokens") or 0]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for count in (*counts, 0 if cached is None else cached):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{count!r} is no count of tokens")
    return Usage(counts[0], counts[1], cached, counts[2])
