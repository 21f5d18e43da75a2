"""Prevents: a tenant, or a LoRA adapter, hitting KV that another one computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.cases import BLOCK, Case, tokens
from tests.engine.harness import Engine, assert_same, difference


def two_orders(seed: int, first_block: int = 1) -> tuple[Case, Case]:
    """Two prompts over the same documents: nothing in common but the spans."""
    rng = random.Random(seed)
    a, b, c = (tokens(rng, n * BLOCK) for n in (4, 3, 5))
    one = (
        Case()
        .prefix(tokens(rng, first_block * BLOCK))
        .span(a)
        .span(b)
        .span(c)
        .cross(tokens(rng, 9))
    )
    two = Case().prefix(tokens(rng, 2 * BLOCK)).span(c).span(a).span(b).cross(tokens(rng, 9))
    return one, two


@pytest.mark.parametrize("first_block", [0, 1])
def test_salts_do_not_share_spans(spans_engine: Engine, first_block: int) -> None:
    """The salt has to enter at every span start: in stock vLLM it stands in block 0 only."""
    one, two = two_orders(51, first_block)
    before = spans_engine.counters().get("vllm_spans_reused_tokens_total", 0)
    expected = spans_engine.one(two.request(salt="tenant-b"))
    spans_engine.reset()
    assert spans_engine.one(one.request(salt="tenant-a"))["cached"] == 0
    for salt in ("tenant-b", None, "tenant-c"):
        got = spans_engine.one(two.request(salt=salt))
        assert got["cached"] == 0, f"{salt} hit tenant-a's KV"
        assert_same(expected, got, f"salt {salt}")
    assert spans_engine.counters().get("vllm_spans_reused_tokens_total", 0) == before
    # The same salt does hit, so the zero above is the salt's doing.
    hit = spans_engine.one(two.request(salt="tenant-a"))
    assert hit["cached"] == 9 * BLOCK
    assert_same(expected, hit, "same salt")


def test_salts_in_one_step(spans_engine: Engine) -> None:
    one, two = two_orders(52)
    results = spans_engine.many([one.request(salt="a"), two.request(salt="b"), two.request()])
    assert [r["cached"] for r in results] == [0, 0, 0]


def save_adapter(folder: Path, seed: int) -> str:
    """A random LoRA adapter on the tiny Llama's attention, strong enough to change every key."""
    generator = torch.Generator().manual_seed(seed)
    rank, hidden, layers = 4, 256, 4
    width = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    weights = {}
    for layer in range(layers):
        for name, out in width.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.1
            weights[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.1
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(width),
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_adapters_do_not_share_spans(engines: Any, tiny_model: str, tmp_path: Path) -> None:
    engine = engines.get(
        tiny_model, enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=2048
    )
    adapters: list[str | None] = [
        save_adapter(tmp_path / "a", 1),
        save_adapter(tmp_path / "b", 2),
        None,
    ]
    one, two = two_orders(53)
    alone = []
    for adapter in adapters:
        engine.reset()
        alone.append(engine.one(two.request(lora=adapter)))
    assert min(difference(alone[0], alone[1]), difference(alone[0], alone[2])) > 0.01
    engine.reset()
    for adapter, expected in zip(adapters, alone, strict=True):
        engine.one(one.request(lora=adapter))
        got = engine.one(two.request(lora=adapter))
        assert got["cached"] == 9 * BLOCK
        assert_same(expected, got, f"adapter {adapter}")
    engine.reset()
    engine.one(one.request(lora=adapters[0]))
    for adapter, expected in zip(adapters[1:], alone[1:], strict=True):
        got = engine.one(two.request(lora=adapter))
        assert got["cached"] == 0, f"adapter {adapter} hit another adapter's KV"
        assert_same(expected, got, f"adapter {adapter}")
