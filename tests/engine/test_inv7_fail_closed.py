"""Prevents: a flag, a setting or a layout that cannot be honoured being ignored."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.cases import BLOCK, documents, random_case, tokens
from tests.engine.harness import ROOT, Engine, EngineError, assert_same, engine_env
from tests.offload.engines import both, connector, stock_connector

SCRIPT = """
import json, os, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.engine.arg_utils import EngineArgs
for name, (options, env) in json.load(sys.stdin).items():
    os.environ.update(env)
    try:
        EngineArgs(dtype="float32", **options).create_engine_config()
        answer = None
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    for key in env:
        del os.environ[key]
    print("RESULT " + json.dumps([name, answer]))
"""

# Options, environment, and what the refusal has to name.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "unknown policy": ({}, {"VLLM_V1_SPANS_GAP_POLICY": "legolinc"}, "legolinc"),
    "unknown variable": ({}, {"VLLM_V1_SPANS_GAP_LENGHT": "32"}, "GAP_LENGHT"),
    "gap length off the block size": ({}, {"VLLM_V1_SPANS_GAP_LENGTH": "33"}, "33"),
    "gap length no number": ({}, {"VLLM_V1_SPANS_GAP_LENGTH": "many"}, "many"),
    "unknown key": ({"additional_config": {"spans": {"gap_polocy": "none"}}}, {}, "gap_polocy"),
    "spans no object": ({"additional_config": {"spans": "none"}}, {}, "spans"),
    "speculative decoding": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
        {},
        "speculative",
    ),
    "prefix caching off": ({"enable_prefix_caching": False}, {}, "prefix"),
    "another scheduler": (
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        {},
        "scheduler-cls",
    ),
    "another worker": (
        {"worker_cls": "tests.engine.worker.Worker"},
        {},
        "worker-cls tests.engine.worker.Worker",
    ),
    "another connector": (
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
        {},
        "KV connector OffloadingConnector",
    ),
    "an unsafe connector beside ours": (
        {
            "kv_transfer_config": both(
                connector(cpu_memory="1GiB"),
                {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            )
        },
        {},
        "KV connector ExampleConnector: it keys KV by token ids alone",
    ),
    "nothing side by side": (
        {"kv_transfer_config": both()},
        {},
        "without connectors",
    ),
    "a connector twice": (
        {"kv_transfer_config": both(connector(cpu_memory="1GiB"), connector(cpu_memory="2GiB"))},
        {},
        "SpansOffloadingConnector twice",
    ),
    "a role in a part": (
        {"kv_transfer_config": both({**stock_connector("1MiB"), "kv_role": "kv_producer"})},
        {},
        "kv_role kv_producer of OffloadingConnector",
    ),
    "a connector that hands blocks over": (
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        {},
        "KV connector NixlConnector: it hands the blocks of a request to another engine",
    ),
    "a connector of somebody else": (
        {
            "kv_transfer_config": {
                "kv_connector": "TheirConnector",
                "kv_connector_module_path": "theirs",
                "kv_role": "kv_both",
            }
        },
        {},
        "KV connector TheirConnector: it is not verified",
    ),
    "vLLM's own offloading flag": (
        {"kv_offloading_size": 1.0},
        {},
        "KV connector OffloadingConnector",
    ),
    "no tier": ({"kv_transfer_config": connector()}, {}, "no tier"),
    "unknown tier setting": (
        {"kv_transfer_config": connector(cpu_bytes="1GiB")},
        {},
        "cpu_bytes",
    ),
    "a role that only reads": (
        {"kv_transfer_config": {**connector(cpu_memory="1GiB"), "kv_role": "kv_consumer"}},
        {},
        "kv_consumer",
    ),
    "lora and files": (
        {"kv_transfer_config": connector(files="/tmp"), "enable_lora": True},
        {},
        "LoRA with a file tier",
    ),
    "sleep mode and files": (
        {"kv_transfer_config": connector(files="/tmp"), "enable_sleep_mode": True},
        {},
        "leep mode",
    ),
    "weak hashes and files": (
        {
            "kv_transfer_config": connector(files="/tmp"),
            "prefix_caching_hash_algo": "xxhash",
        },
        {},
        "xxhash",
    ),
    "weights without files, and files": (
        {"kv_transfer_config": connector(files="/tmp"), "load_format": "sharded_state"},
        {},
        "sharded_state",
    ),
    "two workers and vLLM's offloading": (
        {"kv_transfer_config": stock_connector("1GiB"), "tensor_parallel_size": 2},
        {},
        "OffloadingConnector with more than one worker",
    ),
    "data parallelism and tiers": (
        {"kv_transfer_config": connector(cpu_memory="1GiB"), "data_parallel_size": 2},
        {},
        "data parallelism",
    ),
    "transformers backend": ({"model_impl": "transformers"}, {}, "ransformers"),
    # Their attention lives in transformers' own code, where nothing leaves K un-rotated.
    "smollm3": ({}, {}, "SmolLM3ForCausalLM"),
    "phi": ({}, {}, "PhiForCausalLM"),
    "gpt_neox": ({}, {}, "GPTNeoXForCausalLM"),
    "olmo2": ({}, {}, "Olmo2ForCausalLM"),
    "starcoder2": ({}, {}, "Starcoder2ForCausalLM"),
    "windows of an architecture not verified with them": (
        {"hf_overrides": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4}},
        {},
        "sliding windows of LlamaForCausalLM",
    ),
    "chunked attention": (
        {"hf_overrides": {"layer_types": ["chunked_attention"] * 4}},
        {},
        "chunked_attention",
    ),
    "hybrid manager with windows": (
        {"model": "gemma3", "disable_hybrid_kv_cache_manager": False},
        {},
        "--no-disable-hybrid-kv-cache-manager",
    ),
    "hybrid manager with one window": (
        {"model": "mistral_window", "disable_hybrid_kv_cache_manager": False},
        {},
        "--no-disable-hybrid-kv-cache-manager",
    ),
    "a RoPE type of some layers": (
        {
            "model": "gemma3",
            "hf_overrides": {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                    "full_attention": {
                        "rope_type": "dynamic",
                        "rope_theta": 1000.0,
                        "factor": 2.0,
                    },
                }
            },
        },
        {},
        "RoPE of type 'dynamic'",
    ),
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing wrong": {},
    "hybrid manager without windows": {"disable_hybrid_kv_cache_manager": False},
    "hybrid manager off": {"model": "gemma3", "disable_hybrid_kv_cache_manager": True},
    "windows switched off": {"model": "mistral_window", "disable_sliding_window": True},
    "windows": {"model": "gemma3"},
    "two workers and tiers": {
        "kv_transfer_config": connector(cpu_memory="1GiB"),
        "tensor_parallel_size": 2,
    },
    "vLLM's offloading": {"kv_transfer_config": stock_connector("1GiB")},
    "connectors side by side": {
        "kv_transfer_config": both(stock_connector("1GiB"), connector(cpu_memory="1GiB"))
    },
    "tiers": {"kv_transfer_config": connector(cpu_memory="1GiB", files="/tmp")},
    "lora and CPU memory": {
        "kv_transfer_config": connector(cpu_memory="1GiB"),
        "enable_lora": True,
    },
}


@pytest.fixture(scope="module")
def refusals(tiny_model: str, model_path: Callable[[str], str]) -> dict[str, str | None]:
    """What each combination is refused with; all of them in one process."""
    from tests.reference.models import BUILDERS

    def case(
        name: str, options: dict[str, Any], env: dict[str, str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        model = options.get("model", name)
        return {**options, "model": model_path(model) if model in BUILDERS else tiny_model}, env

    cases = {name: case(name, options, env) for name, (options, env, _) in REFUSED.items()}
    cases |= {name: case(name, options, {}) for name, options in ACCEPTED.items()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(cases),
        env=engine_env(True),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert len(lines) == len(cases), done.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT ")) for line in lines)


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_start_is_refused_by_name(refusals: dict[str, str | None], what: str) -> None:
    answer = refusals[what]
    assert answer is not None, f"{what} was accepted"
    assert REFUSED[what][2] in answer


@pytest.mark.parametrize("what", sorted(ACCEPTED))
def test_what_is_right_is_not_refused(refusals: dict[str, str | None], what: str) -> None:
    assert refusals[what] is None


def test_a_cpu_tier_without_room_for_a_block_stops_the_start(tiny_model: str) -> None:
    """How large a block is shows only when the cache is laid out."""
    with pytest.raises(EngineError, match="holds no block"):
        Engine(tiny_model, kv_transfer_config=connector(cpu_memory="4KiB")).close()


def test_a_real_start_is_refused(tiny_model: str) -> None:
    """vLLM swallows what a plugin raises while it loads; the refusal must stop the engine all the same."""
    with pytest.raises(EngineError, match="GAP_LENGHT"):
        Engine(tiny_model, env={"VLLM_V1_SPANS_GAP_LENGHT": "32"}).close()


BAD_LAYOUTS: dict[str, dict[str, Any]] = {
    "off the block grid": {"span_starts": [5]},
    "not increasing": {"span_starts": [2 * BLOCK, BLOCK]},
    "twice the same": {"span_starts": [BLOCK, BLOCK]},
    "outside the prompt": {"span_starts": [BLOCK * 40]},
    "negative": {"span_starts": [-BLOCK]},
    "no list": {"span_starts": "32"},
    "no integers": {"span_starts": [32.0]},
    "both kinds": {"span_starts": [BLOCK], "cross_span_starts": [BLOCK]},
    "cross off the block grid": {"span_starts": [BLOCK], "cross_span_starts": [2 * BLOCK + 1]},
    "cross without a span": {"cross_span_starts": [BLOCK]},
    "unknown policy": {"span_starts": [BLOCK], "span_gap_policy": "legolinc"},
    "gap length off the block size": {"span_starts": [BLOCK], "span_gap_length": 33},
    "negative gap length": {"span_starts": [BLOCK], "span_gap_length": -32},
}


def test_bad_layouts_are_refused_and_the_engine_lives(spans_engine: Engine) -> None:
    """Each is refused on submission, not inside the engine core, and a good request goes on."""
    rng = random.Random(91)
    case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
    expected = spans_engine.one(case.request())
    text = tokens(rng, 6 * BLOCK + 9)
    requests = [{"id": name, "tokens": text, **layout} for name, layout in BAD_LAYOUTS.items()]
    results = spans_engine.run([*requests, case.request(id="good")])["results"]
    for name in BAD_LAYOUTS:
        assert "error" in results[name], f"{name} was accepted: {results[name]}"
    assert_same(expected, results["good"], "beside bad layouts")


def test_prompt_logprobs_with_spans_are_refused(spans_engine: Engine) -> None:
    rng = random.Random(92)
    case = random_case(rng, documents(rng, 4), max_spans=5, max_blocks=30)
    result = spans_engine.one(case.request(params={"prompt_logprobs": 1}))
    assert "prompt_logprobs" in result.get("error", ""), result
