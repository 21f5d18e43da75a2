"""Mixed HTTP traffic: every kind of request a server with spans meets, good and bad."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.engine.cases import Case, documents, random_case
from tests.http.server import MODEL_NAME

WORDS = [
    "option",
    "parser",
    "argument",
    "value",
    "default",
    "help",
    "action",
    "string",
    "list",
    "program",
    "usage",
    "name",
    "type",
    "text",
    "line",
    "width",
    "format",
    "error",
    "required",
    "optional",
    "prefix",
    "group",
    "command",
    "version",
    "print",
]

Kind = Callable[["Traffic", random.Random], Awaitable[None]]


class Traffic:
    """Sends requests and notes what came back.

    Args:
        client: Client with the server's base address.
        seed: Random seed of documents and choices.
    """

    def __init__(self, client: httpx.AsyncClient, seed: int = 0) -> None:
        self.client = client
        rng = random.Random(seed)
        self.texts = [self.text(rng, rng.randint(40, 120)) for _ in range(6)]
        self.pool = documents(rng, 6, (1, 3))
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []

    @staticmethod
    def text(rng: random.Random, words: int) -> str:
        """Random English-looking text."""
        return " ".join(rng.choice(WORDS) for _ in range(words))

    def case(self, rng: random.Random) -> Case:
        """A random prompt of token ids with spans."""
        return random_case(rng, self.pool, max_spans=4, max_blocks=16)

    def chat(self, rng: random.Random, **extra: Any) -> dict[str, Any]:
        """A chat body with spans as content parts or as documents."""
        chosen = rng.sample(self.texts, rng.randint(1, 3))
        question = self.text(rng, 6) + "?"
        body: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 5, "temperature": 0}
        if rng.random() < 0.5:
            parts = [{"type": "text", "text": t, "span": True} for t in chosen]
            parts.append({"type": "text", "text": question})
            return {**body, "messages": [{"role": "user", "content": parts}], **extra}
        found = [{"title": f"d{i}", "text": t} for i, t in enumerate(chosen)]
        messages = [{"role": "user", "content": question}]
        return {**body, "messages": messages, "documents": found, **extra}

    def completion(self, case: Case, **extra: Any) -> dict[str, Any]:
        """A completion body with raw offsets."""
        xargs: dict[str, Any] = {"span_starts": case.span_starts}
        if case.cross_span_starts:
            xargs["cross_span_starts"] = case.cross_span_starts
        return {
            "model": MODEL_NAME,
            "prompt": case.tokens,
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "vllm_xargs": xargs,
            **extra,
        }

    async def send(self, path: str, body: dict[str, Any], expected: int = 200) -> dict[str, Any]:
        """POST a body, note an unexpected status, return the answer."""
        response = await self.client.post(path, json=body)
        self.statuses[str(response.status_code)] += 1
        if response.status_code != expected:
            self.problems.append(
                f"{path} gave {response.status_code}, not {expected}: {response.text[:300]} for "
                f"{json.dumps(body)[:300]}"
            )
            return {}
        return dict(response.json())

    def expect(self, truth: object, what: str) -> None:
        """Note a problem unless ``truth``."""
        if not truth:
            self.problems.append(what)

    # -- kinds --------------------------------------------------------------------------------

    async def chat_with_spans(self, rng: random.Random) -> None:
        """Documents or marked parts."""
        answer = await self.send("/v1/chat/completions", self.chat(rng))
        if answer:
            self.expect(answer["usage"]["prompt_tokens"] > 32, "a chat prompt without its spans")

    async def offsets(self, rng: random.Random) -> None:
        """Raw offsets."""
        case = self.case(rng)
        answer = await self.send("/v1/completions", self.completion(case))
        if answer:
            self.expect(answer["usage"]["prompt_tokens"] == len(case.tokens), "wrong prompt_tokens")

    async def plain(self, rng: random.Random) -> None:
        """No spans."""
        messages = [{"role": "user", "content": self.text(rng, 30)}]
        await self.send(
            "/v1/chat/completions", {"model": MODEL_NAME, "messages": messages, "max_tokens": 8}
        )

    async def streaming(self, rng: random.Random) -> None:
        """A stream that is read to its end."""
        body = self.chat(rng, stream=True, stream_options={"include_usage": True}, max_tokens=8)
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            self.statuses[str(response.status_code)] += 1
            lines = [line async for line in response.aiter_lines() if line]
        done = lines and lines[-1] == "data: [DONE]"
        self.expect(response.status_code == 200 and done, f"a stream that ended with {lines[-1:]}")

    async def abort(self, rng: random.Random) -> None:
        """A client that goes away at a random moment."""
        body = self.chat(rng, stream=True, max_tokens=400)
        body["ignore_eos"] = True
        try:
            async with asyncio.timeout(rng.random() * 3):
                async with self.client.stream(
                    "POST", "/v1/chat/completions", json=body
                ) as response:
                    self.statuses[str(response.status_code)] += 1
                    async for _ in response.aiter_lines():
                        if rng.random() < 0.1:
                            return
        except TimeoutError:
            self.statuses["aborted"] += 1

    async def bad_markup(self, rng: random.Random) -> None:
        """Each is a 400 in OpenAI's error shape that names the part at fault."""
        case = self.case(rng)
        bodies = [
            (
                "/v1/completions",
                self.completion(case, vllm_xargs={"span_starts": [7]}),
                "span_starts",
            ),
            (
                "/v1/completions",
                self.completion(case, vllm_xargs={"span_starts": [64, 32]}),
                "span_starts",
            ),
            (
                "/v1/completions",
                self.completion(case, vllm_xargs={"span_starts": [320000]}),
                "span_starts",
            ),
            (
                "/v1/completions",
                self.completion(case, vllm_xargs={"span_sarts": [0]}),
                "span_sarts",
            ),
            ("/v1/completions", self.completion(case, prompt_logprobs=1), "prompt_logprobs"),
            ("/v1/chat/completions", self.chat(rng, spans={"gap_polocy": "none"}), "gap_polocy"),
            ("/v1/chat/completions", self.chat(rng, spans={"gap_policy": "legolinc"}), "legolinc"),
            (
                "/v1/chat/completions",
                self.chat(
                    rng,
                    documents=None,
                    messages=[
                        {
                            "role": "assistant",
                            "content": [{"type": "text", "text": "x", "span": True}],
                        },
                        {"role": "user", "content": "y"},
                    ],
                ),
                "assistant",
            ),
        ]
        path, body, name = rng.choice(bodies)
        response = await self.client.post(path, json=body)
        self.statuses[str(response.status_code)] += 1
        ok = response.status_code == 400 and name in response.text
        if ok:
            ok = {"message", "type", "code"} <= response.json()["error"].keys()
        self.expect(ok, f"bad {name} gave {response.status_code}: {response.text[:300]}")

    async def two_answers(self, rng: random.Random) -> None:
        """``n=2``."""
        answer = await self.send("/v1/chat/completions", self.chat(rng, n=2, temperature=0.7))
        if answer:
            self.expect(len(answer["choices"]) == 2, "n=2 gave one choice")

    async def logprobs(self, rng: random.Random) -> None:
        """Log-probabilities of every token of the answer."""
        body = self.chat(rng, logprobs=True, top_logprobs=3)
        answer = await self.send("/v1/chat/completions", body)
        if answer:
            content = answer["choices"][0]["logprobs"]["content"]
            self.expect(content and len(content[0]["top_logprobs"]) == 3, "no log-probabilities")

    async def structured(self, rng: random.Random) -> None:
        """A JSON schema."""
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = self.chat(rng, response_format=form, max_tokens=200)
        answer = await self.send("/v1/chat/completions", body)
        if answer and answer["choices"][0]["finish_reason"] == "stop":
            try:
                text = json.loads(answer["choices"][0]["message"]["content"])
                self.expect(isinstance(text["ok"], bool), f"not by the schema: {text}")
            except (ValueError, KeyError) as error:
                self.problems.append(f"structured output: {error}")


KINDS: list[Kind] = [
    Traffic.chat_with_spans,
    Traffic.offsets,
    Traffic.offsets,
    Traffic.plain,
    Traffic.streaming,
    Traffic.abort,
    Traffic.bad_markup,
    Traffic.two_answers,
    Traffic.logprobs,
    Traffic.structured,
]


async def flood(url: str, count: int, seed: int = 0) -> Traffic:
    """Send ``count`` requests of all kinds at once.

    Args:
        url: The server's address.
        count: How many requests.
        seed: Random seed.

    Returns:
        The traffic with its statuses and problems.
    """
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=32)
    timeout = httpx.Timeout(600.0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
        traffic = Traffic(client, seed)

        async def one(index: int) -> None:
            kind = KINDS[index % len(KINDS)]
            try:
                await kind(traffic, random.Random(seed * 100_003 + index))
            except httpx.HTTPError as error:
                traffic.problems.append(f"{kind.__name__}: {type(error).__name__} {error}")

        await asyncio.gather(*(one(index) for index in range(count)))
    return traffic
