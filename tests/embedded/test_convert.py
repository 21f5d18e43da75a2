"""The converted model against transformers' own GGUF loader, and the tokenizer."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_spans.embedded import ConvertError, cache_dir, ensure_model
from vllm_spans.embedded.convert import convert
from vllm_spans.embedded.fetch import GGUF_NAME, fetch_gguf

TEXTS = [
    "The lighthouse keeper counted 1,024 waves before dawn.",
    "  leading spaces,\ttabs\nand\n\nnewlines  ",
    "Ünïcödé, 漢字, emoji 🛰️ and code: if (a != b) { return a + b; }",
    "<|im_start|>user\nHello<|im_end|>\n",
]


@pytest.fixture(scope="module")
def model_dir():
    return ensure_model()


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def test_logits_equal_those_of_transformers_gguf_loader(model_dir, tokenizer):
    ids = tokenizer(" ".join(TEXTS), return_tensors="pt").input_ids
    source = fetch_gguf(cache_dir() / "downloads", lambda line: None)
    with torch.inference_mode():
        ours = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=GGUF_NAME, dtype=torch.float32
        )(ids).logits
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= 1e-5


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_are_single_tokens_and_specials_are_whole(tokenizer):
    assert len(tokenizer("2048", add_special_tokens=False).input_ids) == 4
    assert tokenizer("<|im_end|>", add_special_tokens=False).input_ids == [tokenizer.eos_token_id]


def test_chat_template_comes_with_the_model(tokenizer):
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_other_architecture_is_refused_by_name(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConvertError, match=r"mamba|llama"):
        convert(path, tmp_path)
