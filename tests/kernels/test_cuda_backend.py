"""Prevents: a row of a step seeing rotated pages of another row, another place or another pass.

Random steps (decode rows, prefill chunks, gap rows that share their request's pages, isolated rows) go through the
metadata builder and the implementation, and every token is compared with float64. On a GPU the stock kernels are
FlashAttention's and Triton's own; elsewhere a plain torch version stands in for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from tests.kernels import reference
from tests.kernels.paged_reference import PagedReferenceBuilder, PagedReferenceImpl, attend
from vllm_spans.attention.cuda_impl import SpansCudaAttentionImpl
from vllm_spans.attention.cuda_metadata import SpansCudaMetadataBuilder, step_rows
from vllm_spans.attention.cuda_scratch import Scratch, ScratchShape
from vllm_spans.attention.kernels.decode import DecodeWorkspace
from vllm_spans.attention.kv_dtype import kernel_dtype
from vllm_spans.attention.rotary import LayerRotary
from vllm_spans.attention.warm_up import warm_up_decode
from vllm_spans.config import SpansConfigError
from vllm_spans.core.rows import ROW_PREFIX, contextual_group, isolated_group

BLOCK, LONGEST = 16, 320
NOBODYS = 0
"""A block of NaN, where a row's block table does not say more."""

CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Case:
    """One layer and what its step looks like."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    rotary_dim: int = 64
    is_neox: bool = True
    cache_dtype: str = "auto"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scratch_tokens: int | None = None
    requests: int = 2


CASES = {
    "plain": Case(),
    "several passes": Case(scratch_tokens=LONGEST, requests=4),
    "partial rotary, gptj": Case(rotary_dim=32, is_neox=False),
    "no rotary": Case(rotary_dim=0),
    "fp8": Case(cache_dtype="fp8"),
    "fp8, several passes": Case(cache_dtype="fp8_e4m3", scratch_tokens=LONGEST, requests=4),
    "window": Case(window=50),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks=True),
    "sinks and window": Case(sinks=True, window=33),
    "one KV head": Case(heads=4, kv_heads=1, head_size=128, rotary_dim=128),
}


def backends() -> list[str]:
    """Stock kernels that run here."""
    return ["FLASH_ATTN", "TRITON_ATTN"] if CUDA else ["reference"]


@pytest.fixture(scope="module")
def make_config(model_path: Callable[[str], str]) -> Callable[[int | None], VllmConfig]:
    """vLLM's own configuration, with spans' settings in it."""
    path = model_path("llama")

    def make(scratch_tokens: int | None) -> VllmConfig:
        dtype = "bfloat16" if CUDA else "float32"
        config = EngineArgs(
            model=path,
            skip_tokenizer_init=True,
            dtype=dtype,
            block_size=BLOCK if CUDA else 32,
            max_model_len=LONGEST,
            max_num_batched_tokens=512,
            max_num_seqs=8,
        ).create_engine_config()
        config.cache_config.block_size = BLOCK
        config.additional_config = {"spans": {"scratch_tokens": scratch_tokens}}
        return config

    return make


@dataclass
class Row:
    """A row of a step."""

    row_id: str
    table: list[int]
    start: int
    end: int


@dataclass
class Step:
    """Rows over the blocks of some requests, decode rows first."""

    rows: list[Row] = field(default_factory=list)
    num_blocks: int = NOBODYS + 1

    @classmethod
    def random(cls, rng: random.Random, requests: int) -> Step:
        step = cls()
        numbers = iter(range(10**6))
        for request in range(requests):
            name = f"r{request}"
            length = rng.randint(2, LONGEST)
            table = step.take(-(-length // BLOCK))
            if rng.random() < 0.4:
                step.rows.append(Row(name, table, length - 1, length))
                continue
            chunk = rng.randint(2, min(20, length))
            step.rows.append(Row(name, table, length - chunk, length))
            for _ in range(rng.randint(0, 4)):
                start = rng.randrange(length - chunk + 1)
                end = min(start + rng.choice((1, 16, 32)), length - chunk)
                if end > start:
                    row_id = f"{ROW_PREFIX}{next(numbers)}{contextual_group(name)}"
                    step.rows.append(Row(row_id, table, start, end))
            for span in range(rng.randint(0, 2)):
                count = rng.randint(1, 5) * BLOCK
                row_id = f"{ROW_PREFIX}{next(numbers)}{isolated_group(name, span)}"
                step.rows.append(Row(row_id, step.take(count // BLOCK), 0, count))
        step.rows.sort(key=lambda row: row.end - row.start)
        return step

    def take(self, count: int) -> list[int]:
        first = self.num_blocks
        self.num_blocks += count
        return list(range(first, self.num_blocks))

    def common(self, device: str, permutation: torch.Tensor) -> CommonAttentionMetadata:
        """The step as vLLM's runner describes it. Only the row that leads a group has the group's whole table."""
        counts = torch.tensor([row.end - row.start for row in self.rows])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        ends = torch.tensor([row.end for row in self.rows], dtype=torch.int32)
        table = torch.full(
            (len(self.rows), LONGEST // BLOCK), int(permutation[NOBODYS]), dtype=torch.int32
        )
        longest: dict[int, Row] = {}
        for row in self.rows:
            first = row.table[0]
            if row.end - row.start > 1 and (first not in longest or row.end > longest[first].end):
                longest[first] = row
        for index, row in enumerate(self.rows):
            if row.end - row.start == 1 or longest[row.table[0]] is row:
                blocks = permutation[torch.tensor(row.table[: -(-row.end // BLOCK)])]
                table[index, : blocks.shape[0]] = blocks.int()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            num_reqs=len(self.rows),
            num_actual_tokens=int(counts.sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.to(device),
            slot_mapping=torch.zeros(int(counts.sum()), dtype=torch.int64, device=device),
            seq_lens_cpu_upper_bound=ends,
        )


class Layer:
    """What the implementation reads of an attention layer."""

    def __init__(self, heads: int, kv_heads: int, scale: float) -> None:
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self._k_scale_float, self._v_scale_float = scale, 2 * scale


def classes(backend: str) -> tuple[Any, Any]:
    """Implementation and builder over one stock backend."""
    if backend == "reference":

        class Impl(SpansCudaAttentionImpl):
            stock_impl_cls = PagedReferenceImpl

        class Builder(SpansCudaMetadataBuilder):
            stock_builder_cls = PagedReferenceBuilder

        return Impl, Builder
    from vllm_spans.attention import cuda_backends

    found = {
        "FLASH_ATTN": cuda_backends.SpansFlashAttentionBackend,
        "TRITON_ATTN": cuda_backends.SpansTritonAttentionBackend,
    }[backend]
    return found.get_impl_cls(), found.get_builder_cls()


def error_of(case: Case, backend: str, config: VllmConfig, seed: int) -> tuple[float, int]:
    """Relative error of a random step, and its number of passes."""
    device = "cuda" if CUDA else "cpu"
    dtype = config.model_config.dtype
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    step = Step.random(rng, case.requests)
    permutation = torch.randperm(step.num_blocks, generator=generator)
    shape = (step.num_blocks, case.kv_heads, BLOCK, 2 * case.head_size)
    fp8 = kernel_dtype(case.cache_dtype)
    values = torch.randn(shape, generator=generator)
    values[permutation[NOBODYS]] = float("nan")
    cache = values.to(fp8 or dtype).to(device)
    k_scale = 0.5 if fp8 else 1.0
    layer = Layer(case.heads, case.kv_heads, k_scale)
    config.cache_config.cache_dtype = case.cache_dtype
    config.compilation_config.static_forward_context["layer"] = layer
    sinks = torch.randn(case.heads, generator=generator).to(device, dtype) if case.sinks else None
    scale = case.head_size**-0.5
    impl_cls, builder_cls = classes(backend)
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=case.kv_heads,
        head_size=case.head_size,
        dtype=torch.uint8 if fp8 else dtype,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if fp8 else KVQuantMode.NONE,
    )
    with set_current_vllm_config(config):
        impl = impl_cls(
            case.heads,
            case.head_size,
            scale,
            case.kv_heads,
            None,
            case.window,
            case.cache_dtype,
            case.softcap,
            **({"sinks": sinks} if sinks is not None else {}),
        )
        layer.impl = impl  # type: ignore[attr-defined]
        builder = builder_cls(spec, ["layer"], config, torch.device(device))
        table = reference.cos_sin_table(LONGEST, case.rotary_dim, dtype, device)
        if table is not None:
            impl.layer_rotary = LayerRotary(table, case.head_size, case.is_neox)
        impl.scratch = Scratch.allocate(
            ScratchShape.of(config), case.kv_heads, case.head_size, dtype, device
        )
        common = step.common(device, permutation)
        step_rows.ids = [row.row_id for row in step.rows]
        metadata = builder.build(0, common)
        step_rows.ids = None
        query = torch.randn(
            common.num_actual_tokens, case.heads, case.head_size, generator=generator
        )
        query = query.to(device, dtype)
        output = torch.full_like(query, float("nan"))
        stored = cache.view(torch.uint8) if fp8 else cache
        impl.forward(layer, query, query, query, stored, metadata, output)

    key, value = cache.transpose(1, 2).split(case.head_size, dim=-1)
    want, index = torch.zeros(query.shape, dtype=torch.float64, device=device), 0
    for row in step.rows:
        blocks = permutation[torch.tensor(row.table)][None]
        k = reference.gather(key, blocks, 0, row.end, k_scale)
        k = reference.rotate(k, torch.arange(row.end), table, case.is_neox)
        v = reference.gather(value, blocks, 0, row.end, 2 * k_scale)
        for position in range(row.start, row.end):
            window_left = -1 if case.window is None else case.window - 1
            want[index] = attend(
                query[index],
                k[: position + 1],
                v[: position + 1],
                case.heads // case.kv_heads,
                scale,
                window_left,
                case.softcap or 0.0,
                sinks,
            )
            index += 1
    return reference.relative_error(output, want), len(metadata.passes)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", CASES)
def test_random_step(name: str, backend: str, make_config: Any) -> None:
    case = CASES[name]
    config = make_config(case.scratch_tokens)
    passes = 0
    for seed in range(2):
        error, count = error_of(case, backend, config, seed)
        passes = max(passes, count)
        assert error < (1e-2 if CUDA else 1e-5), (seed, error)
    assert (passes > 1) == (case.scratch_tokens is not None)


def test_decode_is_warmed_up_for_all_batch_sizes(make_config: Any) -> None:
    """A workspace of 20 rows has two classes of batch sizes, and the second one is not full."""
    impl_cls, _ = classes(backends()[0])
    dtype = torch.bfloat16 if CUDA else torch.float32
    device = "cuda" if CUDA else "cpu"
    workspace = DecodeWorkspace.create(20, 2, 2, 64, LONGEST, device, query_dtype=dtype)
    layers = []
    with set_current_vllm_config(make_config(None)):
        for window in (None, 50, 50):
            layer = Layer(4, 2, 1.0)
            layer.head_size, layer.dtype = 64, dtype  # type: ignore[attr-defined]
            layer.kv_cache = torch.zeros((1, 2, BLOCK, 128), dtype=dtype, device=device)  # type: ignore[attr-defined]
            layer.impl = impl_cls(4, 64, 0.125, 2, None, window, "auto")  # type: ignore[attr-defined]
            layers.append(layer)
    assert warm_up_decode(layers, workspace, LONGEST // BLOCK) == 4


def test_scratch_must_hold_the_longest_sequence(make_config: Any) -> None:
    with pytest.raises(SpansConfigError, match="SCRATCH_TOKENS=100 "):
        ScratchShape.of(make_config(100))


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["SpansFlashAttentionBackend", "SpansTritonAttentionBackend"])
def test_backends_take_quantised_caches_on_any_gpu(name: str, cache_dtype: Any) -> None:
    """The stock kernel reads the scratch cache, so that its own limits on quantised caches do not hold."""
    from vllm.platforms.interface import DeviceCapability

    from vllm_spans.attention import cuda_backends

    reasons = getattr(cuda_backends, name).validate_configuration(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype=cache_dtype,
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(8, 6),
        attn_type="decoder",
        has_sliding_window=True,
    )
    assert reasons == []
