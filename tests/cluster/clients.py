"""Clients of the engines that keep count of what they asked and got, one at a time or as a load."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.cases import BLOCK, Case, documents, tokens

MODEL = "smollm2"
GAP = 32
TIMEOUT = 120.0


@dataclass(frozen=True)
class Answer:
    """What became of one request.

    Attributes:
        error: Why it failed; empty if it did not.
        seconds: From sending to the end.
        chunks: Pieces of text that came.
        usage: The server's usage.
        ended: When it ended, on the monotonic clock.
    """

    error: str
    seconds: float
    chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


@dataclass
class Ledger:
    """The clients' own count, in tokens.

    Attributes:
        requests: Requests answered.
        lookup: Tokens of their spans past the gaps.
        reused: Tokens that the servers said were cached.
        gap: Tokens of the gaps, which are computed again.
    """

    requests: int = 0
    lookup: int = 0
    reused: int = 0
    gap: int = 0

    def add(self, case: Case, answer: Answer) -> None:
        """Count one request."""
        assert not answer.error, answer.error
        self.requests += 1
        self.gap += sum(min(GAP, len(body)) for body in case.bodies)
        self.lookup += sum(max(0, len(body) - GAP) for body in case.bodies)
        self.reused += answer.cached_tokens


class Library:
    """Documents of which each request shows some, in an order of its own and behind a prefix of its own.

    Nothing but spans can be reused between requests, so the servers' ``cached_tokens`` are tokens of spans.

    Args:
        seed: Random seed.
        count: Documents.
        blocks: Blocks of each.
    """

    def __init__(self, seed: int, count: int = 6, blocks: int = 4) -> None:
        self._rng = random.Random(seed)
        self.documents = documents(self._rng, count, (blocks, blocks))
        self._lock = threading.Lock()

    def case(self, shown: int = 3) -> Case:
        """A prompt with some of the documents."""
        with self._lock:
            case = Case().prefix(tokens(self._rng, BLOCK))
            for text in self._rng.sample(self.documents, shown):
                case.span(text)
            return case.cross(tokens(self._rng, 20))


def ask(url: str, case: Case, *, stream: bool = False, max_tokens: int = 4) -> Answer:
    """Ask for a completion over a connection of its own.

    Args:
        url: The server's address.
        case: The prompt.
        stream: As a stream.
        max_tokens: Exactly as many tokens are generated.

    Returns:
        What became of it; a failure is an answer too.
    """
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": case.tokens,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "vllm_xargs": case.layout,
    }
    begin = time.monotonic()
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
            chunks, usage = (_stream if stream else _whole)(client, body)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        ended = time.monotonic()
        return Answer(f"{type(error).__name__}: {error}", ended - begin, ended=ended)
    ended = time.monotonic()
    return Answer("", ended - begin, chunks, usage, ended)


def counted(url: str, name: str, **labels: str) -> float:
    """Sum of an engine's samples of a name.

    Args:
        url: The engine's address.
        name: The sample's name.
        **labels: Labels that it must have.
    """
    page = httpx.get(f"{url}/metrics", timeout=TIMEOUT)
    assert page.status_code == 200, f"{url}/metrics gave {page.status_code}"
    found = 0.0
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found += sample.value
    return found


def _whole(client: httpx.Client, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}: {answer.text[:300]}")
    content = answer.json()
    return len(content["choices"]), content["usage"]


def _stream(client: httpx.Client, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    usage: dict[str, Any] = {}
    chunks, done = 0, False
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {answer.read()[:300]!r}")
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                chunks += len(event["choices"])
                usage = event.get("usage") or usage
    if not done or not usage:
        raise ValueError(f"the stream ended after {chunks} chunks without [DONE] and usage")
    return chunks, usage


class Load:
    """Clients that ask one request after the other until it is closed; a context manager.

    Args:
        url: The servers' address.
        library: What they ask about.
        users: How many ask at once. Every second one streams.
        pause: Seconds between an answer and the next request.
    """

    def __init__(self, url: str, library: Library, users: int = 2, pause: float = 0.3) -> None:
        self._url = url
        self._library = library
        self._pause = pause
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.answers: list[Answer] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(number % 2 == 1,), daemon=True)
            for number in range(users)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(TIMEOUT)

    @property
    def failures(self) -> list[str]:
        """Why requests failed."""
        with self._lock:
            return [answer.error for answer in self.answers if answer.error]

    @property
    def count(self) -> int:
        """Requests that ended."""
        with self._lock:
            return len(self.answers)

    def _ask(self, stream: bool) -> None:
        while not self._end.is_set():
            answer = ask(self._url, self._library.case(), stream=stream)
            with self._lock:
                self.answers.append(answer)
            self._end.wait(self._pause)
