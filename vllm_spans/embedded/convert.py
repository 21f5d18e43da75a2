"""Convert a Llama-architecture GGUF file to a Hugging Face folder in float32.

vLLM reads the Hugging Face form. The quantised weights are expanded exactly, so the float32
logits equal those of transformers' own GGUF loader.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FloatArray = NDArray[np.float32]

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# GGUF token types: 3 is a control token, 4 a user-defined one.
_SPECIAL_TYPES = (3, 4)


class ConvertError(ValueError):
    """The GGUF file is of a kind that this converter does not handle."""


class _Metadata:
    """The file's key-value part; a missing key without a default is an error that names it."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConvertError(f"the GGUF file has no {key!r}")
        return value


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF model into a folder.

    Args:
        gguf: A GGUF file of architecture ``llama`` with a byte-level BPE tokenizer.
        folder: An existing folder; files of the same names are overwritten.

    Raises:
        ConvertError: The architecture, a tensor or the tokenizer is not handled.
    """
    reader = GGUFReader(str(gguf))
    metadata = _Metadata(reader)
    weights = _weights(reader, metadata)
    config = _config(metadata, tied="lm_head.weight" not in weights)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(metadata: _Metadata, tied: bool) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ConvertError(f"architecture {architecture!r} is not handled, only 'llama'")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise ConvertError("scaled RoPE is not handled")
    heads = metadata["llama.attention.head_count"]
    head_dim = metadata.get(
        "llama.attention.key_length", metadata["llama.embedding_length"] // heads
    )
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ConvertError("partial rotary embedding is not handled")
    # The file stores 1e-05 as the nearest float32; the shortest decimal gives back what was meant.
    epsilon = float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": epsilon,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata["llama.rope.freq_base"],
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _weights(reader: GGUFReader, metadata: _Metadata) -> dict[str, FloatArray]:
    heads = metadata["llama.attention.head_count"]
    rotary_heads = {
        "attn_q": heads,
        "attn_k": metadata.get("llama.attention.head_count_kv", heads),
    }
    weights: dict[str, FloatArray] = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type)
        values = values.astype(np.float32, copy=False).reshape(shape)
        if (name := _TOP_LEVEL.get(tensor.name)) is None:
            match = _BLOCK_TENSOR.fullmatch(tensor.name)
            if match is None or match[2] not in _IN_BLOCK:
                raise ConvertError(f"tensor {tensor.name!r} is not handled")
            name = f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"
            if match[2] in rotary_heads:
                values = _undo_rotary_permutation(values, rotary_heads[match[2]])
        weights[name] = np.ascontiguousarray(values)
    return weights


def _undo_rotary_permutation(rows: FloatArray, heads: int) -> FloatArray:
    """Put a head's rows back from interleaved pairs (GGUF) to two halves (Hugging Face)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _special_tokens(metadata: _Metadata) -> list[tuple[int, str]]:
    pairs = zip(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True
    )
    return [(index, text) for index, (text, kind) in enumerate(pairs) if kind in _SPECIAL_TYPES]


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConvertError(f"tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is not handled")
    vocabulary = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for index, text in _special_tokens(metadata):
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        if tokenizer.token_to_id(text) != index:
            raise ConvertError(f"special token {text!r} did not keep its number {index}")
    return tokenizer


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
