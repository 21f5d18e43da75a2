"""Fixtures: the patched API server code of vLLM over a real tokenizer, without an engine."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

DELIMITER = "<|span|>"
TOKEN_PLUS, TOKEN_CROSS = 3, 4


@pytest.fixture(scope="session")
def tokenizer_folder(smollm2_path: str) -> str:
    """A model folder with a real tokenizer, whose template ignores documents."""
    return smollm2_path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: str) -> Any:
    """The tokenizer of that folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    """The API server's patches, taken off again: other tests look at an untouched vLLM."""
    from vllm_spans.patches import api

    stock = []
    for path in api.PATCHED:
        module, _, names = path.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = names.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        stock.append((owner, name, getattr(owner, name)))
    api.apply()
    yield
    for owner, name, value in stock:
        setattr(owner, name, value)


@pytest.fixture(scope="module")
def render_server(patched: None, tokenizer_folder: str) -> Callable[..., Any]:
    """Makes vLLM's OnlineRenderer by chat template and settings, as a server does at its start."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    from vllm_spans.config import SpansConfig

    def make(template: str | None = None, max_model_len: int = 4096, **settings: Any) -> Any:
        args = AsyncEngineArgs(model=tokenizer_folder, max_model_len=max_model_len, block_size=32)
        config = args.create_engine_config()
        config.additional_config = {"spans": SpansConfig(**settings).to_dict()}
        server = OnlineRenderer(
            config.model_config,
            renderer_from_config(config),
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
        )
        server.warmup()
        return server

    return make


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Any], Any]]:
    """Runs a coroutine."""
    with asyncio.Runner() as runner:
        yield runner.run
