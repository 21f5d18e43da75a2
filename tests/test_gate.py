"""Prevents: an engine on CUDA that starts with a GPU, a backend or a dtype that the kernels do not handle.

There is no GPU here, so the platform that vLLM reports is replaced; the checks themselves are the real ones.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_spans.config import SpansConfig, SpansConfigError
from vllm_spans.gate import _cache_reasons, _platform_reasons
from vllm_spans.offload.admission import HOST_SPEC, OFFLOADING_CONNECTOR, connector_reasons
from vllm_spans.patches.engine import cuda_backend, install_into

FLASH, TRITON = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the compute capability of the platform, 90 at first."""
    platform = types.SimpleNamespace(
        device_type="cuda", is_cpu=lambda: False, is_cuda=lambda: True, number=90
    )
    platform.has_device_capability = lambda least: platform.number >= least
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    return platform


def config(
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: str = "auto",
    backend: AttentionBackendEnum | None = None,
    architecture: str = "LlamaForCausalLM",
    **parallel: Any,
) -> Any:
    """The parts of vLLM's configuration that these checks read."""
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(dtype=dtype, architecture=architecture),
        cache_config=types.SimpleNamespace(
            cache_dtype=cache_dtype,
            enable_prefix_caching=True,
            kv_cache_dtype_skip_layers=[],
            kv_sharing_fast_prefill=False,
        ),
        attention_config=types.SimpleNamespace(backend=backend, backend_per_kind={}),
        parallel_config=types.SimpleNamespace(enable_dbo=False, **parallel),
    )


@pytest.mark.parametrize(
    ("number", "options", "named"),
    [
        (75, {}, "older than Ampere"),
        (86, {"cache_dtype": "fp8"}, "use fp8_e5m2 or auto"),
        (90, {"backend": AttentionBackendEnum.FLASHINFER}, "--attention-backend FLASHINFER"),
        (90, {"backend": FLASH, "dtype": torch.float32}, "--dtype torch.float32"),
    ],
)
def test_refused_by_name(capability: Any, number: int, options: dict[str, Any], named: str) -> None:
    capability.number = number
    (reason,) = _platform_reasons(config(**options))
    assert named in reason


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (80, {}),
        (86, {"cache_dtype": "fp8_e5m2"}),
        (89, {"cache_dtype": "fp8"}),
        (90, {"backend": TRITON, "dtype": torch.float32}),
        (90, {"backend": FLASH, "cache_dtype": "fp8_e4m3"}),
    ],
)
def test_what_the_kernels_handle_is_not_refused(
    capability: Any, number: int, options: dict[str, Any]
) -> None:
    capability.number = number
    assert _platform_reasons(config(**options)) == []
    assert _cache_reasons(config(**options)) == []


def test_other_quantised_caches_are_refused(capability: Any) -> None:
    (reason,) = _cache_reasons(config(cache_dtype="int8_per_token_head"))
    assert "--kv-cache-dtype int8_per_token_head" in reason


@pytest.mark.parametrize(
    ("number", "options", "backend"),
    [
        (90, {}, FLASH),
        (80, {}, FLASH),
        (90, {"dtype": torch.float32}, TRITON),
        (90, {"architecture": "GptOssForCausalLM"}, FLASH),
        (86, {"architecture": "GptOssForCausalLM"}, TRITON),
    ],
)
def test_prefill_runs_on_flash_attention_where_it_can(
    capability: Any, number: int, options: dict[str, Any], backend: AttentionBackendEnum
) -> None:
    capability.number = number
    assert cuda_backend(config(**options)) is backend


def test_a_scratch_cache_that_is_too_small_is_refused_before_weights_are_loaded(
    capability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other checks are the business of other tests."""
    monkeypatch.setattr("vllm_spans.gate.check_config", lambda config: None)
    engine = config()
    engine.cache_config.block_size = 16
    engine.model_config.max_model_len = 4096
    engine.scheduler_config = types.SimpleNamespace(async_scheduling=True)
    engine.kv_transfer_config, engine.additional_config = None, {}
    with pytest.raises(SpansConfigError, match="SCRATCH_TOKENS=4095 "):
        install_into(engine, SpansConfig(scratch_tokens=4095))


def with_connector(name: str, module: str | None, **extra: Any) -> Any:
    """The parts of vLLM's configuration that are read for a KV connector."""
    return types.SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
        parallel_config=types.SimpleNamespace(data_parallel_size=1, world_size=1, nnodes=1),
    )


def test_the_tiers_are_admitted_on_a_gpu(capability: Any) -> None:
    assert connector_reasons(with_connector(*OFFLOADING_CONNECTOR, cpu_memory="1GiB")) == []


def test_the_tiers_are_of_one_node(capability: Any) -> None:
    engine = with_connector(*OFFLOADING_CONNECTOR, cpu_memory="1GiB")
    engine.parallel_config.nnodes = 2
    (reason,) = connector_reasons(engine)
    assert "SpansOffloadingConnector on 2 nodes" in reason and "drop" in reason


def test_the_spec_of_the_cpu_build_is_refused_on_a_gpu(capability: Any) -> None:
    """It copies with the processor, from a KV cache that is not in its memory."""
    spec, module = HOST_SPEC
    engine = with_connector(
        "OffloadingConnector", None, spec_name=spec, spec_module_path=module, cpu_bytes_to_use=1
    )
    (reason,) = connector_reasons(engine)
    assert "SpansOffloadingConnector" in reason
