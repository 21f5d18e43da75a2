"""Prompts whose answers are compared: without spans, and with spans in pairs over the same documents."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

from benchmarks.engine_process import Request
from benchmarks.tiny_models import VOCABULARY
from benchmarks.workloads import Corpus

DOCUMENTS = Path(__file__).parents[1] / "demo" / "documents"
POLICIES = ("legolink", "none")


@dataclasses.dataclass(frozen=True)
class Cases:
    """Requests to compare.

    Attributes:
        plain: Without spans.
        spanned: With spans. Two neighbours (0 and 1, 2 and 3, ...) use the same documents at different positions
            under the same policy.
    """

    plain: list[Request]
    spanned: list[Request]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(request["tokens"]) for request in (*self.plain, *self.spanned))


def random_cases(count: int, block: int, most: int) -> Cases:
    """Requests of random tokens.

    Args:
        count: Requests of either kind, an even number.
        block: Tokens of a KV block.
        most: Most blocks of a document and of a prefix, at least 4.
    """
    corpus, rng = Corpus("cases", VOCABULARY), random.Random("cases")
    plain = [{"tokens": corpus.tokens(rng.randint(20, 5 * most * block))} for _ in range(count)]
    # Longer than a gap, so that some of each is always reused.
    pool = [corpus.tokens(block * rng.randint(3, most)) for _ in range(12)]
    spanned: list[Request] = []
    for pair in range(count // 2):
        chosen = rng.sample(pool, rng.randint(2, 6))
        # The first request starts with a span, which then has no gap: it reads blocks that are gaps in the second.
        for order, most_prefix in ((chosen, 0), (_turned(chosen, rng), most // 4)):
            end = Corpus(len(spanned), VOCABULARY, question=rng.randint(1, 3 * block))
            prefix = corpus.tokens(block * rng.randint(0, most_prefix))
            policy = POLICIES[pair % len(POLICIES)]
            spanned.append(end.request(order, prefix, span_gap_policy=policy))
    return Cases(plain, spanned)


def text_cases(model: Path, count: int, block: int) -> Cases:
    """Requests over the demo's documents, by the model's tokenizer.

    Args:
        model: Folder of a model with the chat template's markers ``<|im_start|>`` and ``<|im_end|>``.
        count: Requests of either kind, an even number.
        block: Tokens of a KV block.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random("text")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    (pad,) = encode("\n")

    def padded(text: str) -> list[int]:
        tokens = encode(text)
        return tokens + [pad] * (-len(tokens) % block)

    documents = [path.read_text("utf-8") for path in sorted(DOCUMENTS.glob("*.md"))]
    questions = [
        "What is the first text about?",
        "Write one sentence about each text.",
        "Which text names a year? Say which year.",
        "Summarise the texts for a child.",
    ]

    def head() -> str:
        system = rng.choice(
            ["You answer briefly.", "You are a patient teacher. " * rng.randint(1, 6)]
        )
        return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"

    def tail() -> str:
        return f"{rng.choice(questions)}<|im_end|>\n<|im_start|>assistant\n"

    plain = []
    for _ in range(count):
        chosen = rng.sample(documents, rng.randint(2, 6))
        plain.append({"tokens": encode(head() + "\n\n".join(chosen) + "\n\n" + tail())})
    spanned = []
    for pair in range(count // 2):
        chosen = rng.sample(documents, rng.randint(2, 6))
        for order in (chosen, _turned(chosen, rng)):
            layout: dict[str, Any] = {"span_starts": []}
            tokens = padded(head())
            for document in order:
                layout["span_starts"].append(len(tokens))
                tokens += padded(document)
            layout |= {
                "cross_span_starts": [len(tokens)],
                "span_gap_policy": POLICIES[pair % len(POLICIES)],
            }
            spanned.append({"tokens": tokens + encode(tail()), "extra_args": layout})
    return Cases(plain, spanned)


def _turned(items: list[Any], rng: random.Random) -> list[Any]:
    """Another order in which none stands where it stood."""
    by = rng.randrange(1, len(items))
    return items[by:] + items[:by]
