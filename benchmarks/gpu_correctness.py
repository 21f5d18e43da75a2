"""Invariants of the design on the GPU, in bfloat16, before any timing.

On a model in a folder with real text (the embedded SmolLM2, say), or on a tiny random Llama whose wide initialisation
makes it sensitive to its context. Noise is what stock vLLM shows between a request run alone and in a full batch.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import Corpus, Engine, engines, say

VOCABULARY = 4000
BLOCK = 16
STEPS = 24
DOCUMENTS = Path(__file__).parents[1] / "demo" / "documents"


def save_model(folder: Path) -> Path:
    """A Llama of 4 layers with the head geometry of the large shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
        initializer_range=0.1,
    )
    path = folder / "tiny"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


class Comparison:
    """Greedy steps of two runs of the same requests, up to the first token that differs."""

    def __init__(self) -> None:
        self.steps = self.equal = 0
        self.difference = 0.0

    def add(self, left: dict[str, Any], right: dict[str, Any]) -> None:
        for a, b, entries_a, entries_b in zip(
            left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=True
        ):
            self.steps += 1
            common = entries_a.keys() & entries_b.keys()
            self.difference = max(
                [self.difference, *(abs(entries_a[t] - entries_b[t]) for t in common)]
            )
            if a != b:
                break
            self.equal += 1

    def result(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "same": self.equal / self.steps,
            "max_logprob_difference": self.difference,
        }


Requests = list[dict[str, Any]]


def random_cases() -> tuple[Requests, Requests]:
    """Requests of random tokens: without spans, and with spans."""
    corpus, rng = Corpus(11, VOCABULARY), random.Random(12)
    documents = [corpus.tokens(BLOCK * rng.randint(3, 24)) for _ in range(12)]
    plain = [{"tokens": corpus.tokens(rng.randint(20, 1500))} for _ in range(24)]
    spanned = []
    for policy in ("none", "legolink"):
        for _ in range(8):
            chosen = rng.sample(documents, rng.randint(2, 8))
            tokens, layout = corpus.prompt(
                chosen, prefix=BLOCK * rng.randint(0, 4), question=rng.randint(1, 60)
            )
            spanned.append({"tokens": tokens, "extra_args": layout | {"span_gap_policy": policy}})
    return plain, spanned


def text_cases(model: Path) -> tuple[Requests, Requests]:
    """Requests over the demo's documents: without spans, and with spans."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(13)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    (pad,) = encode("\n")

    def padded(text: str) -> list[int]:
        tokens = encode(text)
        return tokens + [pad] * (-len(tokens) % BLOCK)

    documents = [path.read_text() for path in sorted(DOCUMENTS.glob("*.md"))]
    questions = [
        "What is the first text about?",
        "Write one sentence about each text.",
        "Which text names a year? Say which year.",
        "Summarise the texts for a child.",
    ]
    plain, spanned = [], []
    for number in range(32):
        chosen = rng.sample(documents, rng.randint(2, 6))
        system = rng.choice(
            ["You answer briefly.", "You are a patient teacher. " * rng.randint(1, 6)]
        )
        head = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
        tail = f"{rng.choice(questions)}<|im_end|>\n<|im_start|>assistant\n"
        plain.append({"tokens": encode(head + "\n\n".join(chosen) + "\n\n" + tail)})
        tokens, starts = padded(head), []
        for document in chosen:
            starts.append(len(tokens))
            tokens += padded(document)
        layout = {"span_starts": starts, "cross_span_starts": [len(tokens)]}
        policy = ("legolink", "none")[number % 2]
        spanned.append(
            {"tokens": tokens + encode(tail), "extra_args": layout | {"span_gap_policy": policy}}
        )
    return plain, spanned


def check(folder: Path, logs: Path, real_model: Path | None = None) -> dict[str, Any]:
    """Compare and report.

    Args:
        folder: For a random model.
        logs: For the engines' logs.
        real_model: Folder of a model with its tokenizer; ``None`` for the random one.

    Returns:
        Per comparison the share of equal greedy steps and the largest logprob difference.
    """
    if real_model is None:
        model, (plain, spanned) = save_model(folder), random_cases()
    else:
        model, (plain, spanned) = real_model, text_cases(real_model)
    arguments = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.2,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        },
    }
    result: dict[str, Any] = {}

    def report(name: str, comparison: Comparison) -> None:
        result[name] = comparison.result()
        say(f"{name}: {result[name]}")

    def run(
        engine: Engine, requests: list[dict[str, Any]], together: bool = False
    ) -> list[dict[str, Any]]:
        if together:
            return engine.ask("run", requests=requests, max_tokens=STEPS, logprobs=3)["outputs"]  # type: ignore[no-any-return]
        return [
            engine.ask("run", requests=[r], max_tokens=STEPS, logprobs=3)["outputs"][0]
            for r in requests
        ]

    def compare(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Comparison:
        comparison = Comparison()
        for a, b in zip(left, right, strict=True):
            comparison.add(a, b)
        return comparison

    full = [{**r, "extra_args": r["extra_args"] | {"span_gap_policy": "full"}} for r in spanned]  # type: ignore[operator]
    without = [{"tokens": r["tokens"]} for r in spanned]

    with engines(arguments, logs) as (stock, spans):
        alone = run(stock, plain)
        stock.ask("reset")
        report("noise: stock alone / in a batch", compare(alone, run(stock, plain, together=True)))
        report("no spans alone / stock", compare(run(spans, plain), alone))
        spans.ask("reset")
        report(
            "no spans in a batch / stock alone", compare(run(spans, plain, together=True), alone)
        )
        oracle = run(stock, without)
        report("policy full / stock", compare(run(spans, full), oracle))
        cold = []
        for request in spanned:
            spans.ask("reset")
            cold += run(spans, [request])
        report("legolink and none / full (must differ)", compare(cold, oracle))
        spans.ask("reset")
        run(spans, spanned)
        warm = run(spans, spanned)
        report("warm / cold", compare(warm, cold))
        report("warm, in a batch / cold", compare(run(spans, spanned, together=True), cold))
        spans.ask("reset")
        report(
            "cold, in a batch / cold",
            compare(run(spans, spanned + plain, together=True)[: len(cold)], cold),
        )
        report("no spans after spans / stock", compare(run(spans, plain), alone))
    if real_model is not None:
        return result
    for name, limits in {
        "a tiny cache": {"num_gpu_blocks_override": 300, "max_num_seqs": 8},
        "small budgets": {"max_num_batched_tokens": 256, "max_num_seqs": 4},
    }.items():
        engine = Engine("spans", True, {**arguments, **limits}, logs / "tiny.log")
        try:
            say(f"{name}: {engine.ready()}")
            report(f"{name} / cold", compare(run(engine, spanned, together=True), cold))
            report(f"{name}, again / cold", compare(run(engine, spanned, together=True), cold))
        finally:
            engine.close()
    return result
