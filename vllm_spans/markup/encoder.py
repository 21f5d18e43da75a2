"""PieceEncoder: a tokenizer as the markup needs it.

Needs nothing of vLLM: any Hugging Face tokenizer works.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

_PAD_SETTING = "VLLM_V1_SPANS_PAD_TOKEN"
# Texts in front of which a piece is tokenised where the tokenizer would else write a space before it.
_ANCHORS = ("\n", ":", "a", "0")
_CACHED_TOKENS = 4_000_000
_SHORTEST_CACHED = 64


class PieceEncoder:
    """Tokenises the pieces of a prompt so that their tokens, joined, decode to their texts, joined.

    Args:
        tokenizer: A Hugging Face tokenizer.
        pad_token: The configured pad token: a token's text or its id in digits; ``None`` to choose.
        cached_tokens: Tokens of spans kept, as the same documents come again and again.

    Raises:
        ValueError: ``pad_token`` is no single token of the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, pad_token: str | None = None, cached_tokens: int = _CACHED_TOKENS
    ) -> None:
        self._tokenizer = tokenizer
        self._anchors = self._find_anchors()
        self._room = cached_tokens
        # Arrays: a list of integers takes nine times the memory.
        self._cached: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.head, self.tail = self._special_tokens()
        self.pad_id = self._choose_pad(pad_token)
        logger.info("spans are padded with token %d (%r)", self.pad_id, self.decode([self.pad_id]))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text; the first one opens the prompt, the others follow other text.

        Special tokens written out in a text become special tokens, as everywhere in vLLM.
        """
        if not texts:
            return []
        found: list[list[int] | None] = [None] * len(texts)
        with self._lock:
            for index in range(1, len(texts)):
                if (kept := self._cached.get(texts[index])) is not None:
                    self._cached.move_to_end(texts[index])
                    found[index] = kept.tolist()
        missing = [index for index in range(len(texts)) if found[index] is None]
        found[0] = self._tokenise([texts[0]])[0]
        later = missing[1:]
        for index, tokens in zip(
            later, self._tokenise_later([texts[index] for index in later]), strict=True
        ):
            found[index] = tokens
            self._remember(texts[index], tokens)
        return [tokens or [] for tokens in found]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, truncation=False)["input_ids"]
        return [list(tokens) for tokens in encoded]

    def _tokenise_later(self, texts: list[str]) -> list[list[int]]:
        """Tokens of texts that follow other text.

        SentencePiece tokenizers write a space in front of a text that begins. Tokenised behind an
        anchor, whose tokens are then taken off, a text gets the tokens of a continuation.
        """
        done: list[list[int]] = [[] for _ in texts]
        todo = [index for index, text in enumerate(texts) if text]
        for anchor, prefix in self._anchors:
            rest = []
            behind = self._tokenise([anchor + texts[index] for index in todo])
            for index, tokens in zip(todo, behind, strict=True):
                if tokens[: len(prefix)] == prefix:
                    done[index] = tokens[len(prefix) :]
                else:
                    rest.append(index)
            todo = rest
        for index, tokens in zip(
            todo, self._tokenise([texts[index] for index in todo]), strict=True
        ):
            done[index] = tokens
        return done

    def _find_anchors(self) -> list[tuple[str, list[int]]]:
        one, two = self._tokenise(["a", "b"])
        if self.decode(one + two) == "ab":
            return []
        anchors = list(zip(_ANCHORS, self._tokenise(list(_ANCHORS)), strict=True))
        logger.info(
            "the tokenizer writes a space before a text; pieces are tokenised behind an anchor"
        )
        return anchors

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        (bare,) = self._tokenise(["a"])
        full = list(self._tokenizer(["a"], add_special_tokens=True)["input_ids"][0])
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def _choose_pad(self, pad_token: str | None) -> int:
        if pad_token is not None:
            return self._configured_pad(pad_token)
        # A line end is what stands between documents anyway, runs of it are common in what models
        # are trained on, and it says nothing. The pad and end-of-text tokens are either untrained or
        # mean that the text is over, which a prompt must not say in its middle.
        for text in ("\n", " "):
            (tokens,) = self._tokenise_later([text])
            if len(tokens) == 1 and self.decode(tokens) == text:
                return tokens[0]
        for name in ("pad_token_id", "eos_token_id"):
            if (token := getattr(self._tokenizer, name, None)) is not None:
                return int(token)
        raise ValueError(
            f"The tokenizer has no token for a line end, a space, padding or the end of text. Set "
            f"{_PAD_SETTING} to a token or a token id."
        )

    def _configured_pad(self, pad_token: str) -> int:
        size = len(self._tokenizer)
        if pad_token.isascii() and pad_token.isdigit():
            if int(pad_token) < size:
                return int(pad_token)
            raise ValueError(
                f"{_PAD_SETTING}={pad_token} is no token id of the tokenizer, which has {size} tokens."
            )
        vocabulary = self._tokenizer.get_vocab()
        if pad_token in vocabulary:
            return int(vocabulary[pad_token])
        (tokens,) = self._tokenise_later([pad_token])
        if len(tokens) != 1:
            raise ValueError(
                f"{_PAD_SETTING}={pad_token!r} makes {len(tokens)} tokens. Give a text that is one "
                "token, or a token id."
            )
        return tokens[0]

    def _remember(self, text: str, tokens: list[int]) -> None:
        # Short pieces are mostly questions; they are cheap to tokenise and seldom come again.
        if len(tokens) < _SHORTEST_CACHED:
            return
        with self._lock:
            if text in self._cached:
                return
            self._cached[text] = array("i", tokens)
            self._room -= len(tokens)
            while self._room < 0 and self._cached:
                _, dropped = self._cached.popitem(last=False)
                self._room += len(dropped)
