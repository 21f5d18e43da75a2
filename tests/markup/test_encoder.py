"""PieceEncoder on tokenizers of different kinds."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spans.markup.encoder import PieceEncoder


def sentencepiece_like() -> Any:
    """Writes a space before a text that begins, and a BOS; knows no line end but as a byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [*string.ascii_letters, *string.digits, *".,:?!"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_level() -> Any:
    """Knows neither a line end nor a space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


SENTENCEPIECE = PieceEncoder(sentencepiece_like())

texts = st.lists(st.text(alphabet="ab \né日.", max_size=8), min_size=1, max_size=6)


@given(texts)
def test_pieces_decode_to_the_text_where_the_tokenizer_writes_spaces(parts: list[str]) -> None:
    tokens = [token for piece in SENTENCEPIECE.encode(parts) for token in piece]
    whole = "".join(parts)
    # The tokenizer itself takes the first space for the one that it has written.
    expected = SENTENCEPIECE.decode(SENTENCEPIECE.encode([whole])[0])
    if parts[0]:
        assert SENTENCEPIECE.decode(tokens) == expected
    else:
        assert SENTENCEPIECE.decode(tokens).lstrip(" ") == whole.lstrip(" ")


def test_special_tokens_around_a_prompt() -> None:
    assert SENTENCEPIECE.head == [0]
    assert SENTENCEPIECE.tail == []


def test_the_pad_is_a_line_end() -> None:
    assert SENTENCEPIECE.decode([SENTENCEPIECE.pad_id]) == "\n"


def test_the_pad_without_a_line_end_or_space_is_the_end_of_text() -> None:
    assert PieceEncoder(word_level()).pad_id == 3


def test_real_tokenizer(tokenizer: Any) -> None:
    encoder = PieceEncoder(tokenizer)
    assert encoder.decode([encoder.pad_id]) == "\n"
    long_text = "A document that is long enough to be kept. " * 40
    once = encoder.encode(["", long_text])
    assert encoder.encode(["x", long_text])[1] == once[1]
    once[1].append(5)
    assert encoder.encode(["x", long_text])[1] == once[1][:-1]


def test_kept_tokens_are_bounded(tokenizer: Any) -> None:
    encoder = PieceEncoder(tokenizer, cached_tokens=500)
    for number in range(20):
        encoder.encode(["", f"{number} words and more words. " * 40])
        assert sum(map(len, encoder._cached.values())) + encoder._room == 500
        assert encoder._room >= 0


@pytest.mark.parametrize(
    ("setting", "text"), [("<|im_end|>", "<|im_end|>"), ("\n", "\n"), (" the", " the")]
)
def test_configured_pad(tokenizer: Any, setting: str, text: str) -> None:
    encoder = PieceEncoder(tokenizer, setting)
    assert encoder.decode([encoder.pad_id]) == text


def test_configured_pad_id(tokenizer: Any) -> None:
    assert PieceEncoder(tokenizer, "17").pad_id == 17


@pytest.mark.parametrize("setting", ["999999999", "two words", ""])
def test_a_pad_that_is_no_token_is_refused_by_name(tokenizer: Any, setting: str) -> None:
    with pytest.raises(ValueError, match="VLLM_V1_SPANS_PAD_TOKEN"):
        PieceEncoder(tokenizer, setting)
