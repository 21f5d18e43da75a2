"""Prevents a wrong pair of attention and rotary embedding: shared instances, several per layer, unknown kinds."""

from __future__ import annotations

import pytest
import torch
import vllm.config
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_spans.attention import rotary as rotary_module
from vllm_spans.attention.rotary import QueryRotary, RotaryError, install_query_rotary
from vllm_spans.gate import RopeLayers

assert vllm.config


class FakeAttention(nn.Module):
    """Stands in for vLLM's ``Attention`` in the walk alone: a name, a window, an ``impl`` to be told its rotation."""

    def __init__(self, name: str, sliding_window: int | None = None) -> None:
        super().__init__()
        self.layer_name = name
        self.sliding_window = sliding_window
        self.impl = type("Impl", (), {})()


@pytest.fixture(autouse=True)
def walk_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_module, "Attention", FakeAttention)


def rope(**kwargs: object) -> nn.Module:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        return get_rope(64, max_position=128, **kwargs)  # type: ignore[arg-type]


class Owner(nn.Module):
    def __init__(
        self,
        name: str,
        rotaries: dict[str, nn.Module],
        attention_name: str = "attn",
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        setattr(self, attention_name, FakeAttention(name, sliding_window))
        for attribute, module in rotaries.items():
            setattr(self, attribute, module)


def test_only_the_instance_in_the_pair_is_replaced() -> None:
    shared = rope()
    model = nn.ModuleList(
        [
            Owner("layers.0", {"rotary_emb": shared}),
            Owner("layers.1", {"rope": shared}, attention_name="core_attention"),
            Owner("layers.2", {}),
        ]
    )
    drafter = Owner("drafter", {"rotary_emb": shared})
    layers = install_query_rotary(model, RopeLayers.WITH_MODULE)
    assert set(layers) == {"layers.0", "layers.1", "layers.2"}
    assert layers["layers.2"] is None, "a layer without RoPE"
    assert isinstance(model[0].rotary_emb, QueryRotary) and isinstance(model[1].rope, QueryRotary)
    assert drafter.rotary_emb is shared
    assert model[1].core_attention.impl.layer_rotary is layers["layers.1"]


def test_rotary_of_a_layer_without_window_is_not_used() -> None:
    """Cohere 2: every layer holds a rotary embedding, those without a window do not call it."""
    shared, tokens = rope(), (torch.arange(4), torch.randn(4, 64), torch.randn(4, 64))
    model = nn.ModuleList(
        [
            Owner("layers.0", {"rotary_emb": shared}, sliding_window=48),
            Owner("layers.1", {"rotary_emb": shared}),
        ]
    )
    layers = install_query_rotary(model, RopeLayers.WITH_WINDOW)
    assert layers["layers.0"] is not None and layers["layers.1"] is None
    assert isinstance(model[0].rotary_emb, QueryRotary)
    with pytest.raises(RotaryError, match="rotates, though"):
        model[1].rotary_emb(*tokens)
    with pytest.raises(RotaryError, match="no rotary embedding"):
        install_query_rotary(
            nn.ModuleList([Owner("layer", {}, sliding_window=48)]), RopeLayers.WITH_WINDOW
        )


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
@pytest.mark.parametrize("neox", [True, False])
def test_q_rotated_by_the_model_and_k_by_the_layer_equal_vllm(
    parameters: dict | None, neox: bool
) -> None:
    embedding = rope(rope_parameters=parameters, is_neox_style=neox)
    model = nn.ModuleList([Owner("layer", {"rotary_emb": embedding})])
    layer = install_query_rotary(model)["layer"]
    assert layer is not None
    positions = torch.randperm(128)[:50]
    query, key = torch.randn(50, 4 * 64), torch.randn(50, 2 * 64)
    expected_q, expected_k = embedding.forward_native(positions, query.clone(), key.clone())
    got_q, untouched = model[0].rotary_emb(positions, query.clone(), key.clone())
    torch.testing.assert_close(got_q, expected_q)
    torch.testing.assert_close(untouched, key, rtol=0, atol=0)
    rotated = key.clone()
    layer.rotate(rotated, positions)
    torch.testing.assert_close(rotated, expected_k)


def test_what_cannot_be_handled_is_refused_by_name() -> None:
    with pytest.raises(RotaryError, match="several rotary embeddings: one, two"):
        install_query_rotary(
            nn.ModuleList([Owner("layer", {"one": rope(), "two": rope(is_neox_style=False)})])
        )
    with pytest.raises(RotaryError, match="no rotary embedding"):
        install_query_rotary(nn.ModuleList([Owner("layer", {})]))
    with pytest.raises(RotaryError, match="no attention layer"):
        install_query_rotary(nn.ModuleList([nn.Linear(2, 2)]))

    class OtherRotary(rotary_module.RotaryEmbedding):
        pass

    other = rope()
    other.__class__ = OtherRotary
    try:
        with pytest.raises(RotaryError, match="OtherRotary"):
            install_query_rotary(nn.ModuleList([Owner("layer", {"rotary_emb": other})]))
    finally:
        other.__class__ = rotary_module.RotaryEmbedding
