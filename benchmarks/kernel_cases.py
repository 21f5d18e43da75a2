"""Kernel calls to be checked and timed on a GPU: gathers and batches of decode rows, ours and stock."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from tests.kernels import reference  # noqa: E402
from vllm_spans.attention.kernels.decode import DecodeWorkspace, decode_attention  # noqa: E402
from vllm_spans.attention.kernels.gather_rotate import GatherConfig, gather_rotate  # noqa: E402
from vllm_spans.attention.kernels.launch import DecodeConfig  # noqa: E402

PAGE = 16
FLASH_SPLITS = 32
"""vLLM's ``flash_attn_max_num_splits_for_cuda_graph``."""


@dataclass(frozen=True)
class Shape:
    """Heads of one layer."""

    q_heads: int
    kv_heads: int
    head_size: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.q_heads}/{self.kv_heads}x{self.head_size}"

    @property
    def token_bytes(self) -> int:
        """K and V of a token in bf16."""
        return self.kv_heads * self.head_size * 4


LLAMA = Shape(32, 8, 128)
SMALL = Shape(16, 4, 64)


def timed(work: Callable[[], Any], replays: int = 20) -> float:
    """Median microseconds of a CUDA-graph replay, caches cold for small work."""
    global FLUSH
    if not FLUSH.numel():
        FLUSH = flush_buffer()
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        FLUSH.max()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1000.0


FLUSH = torch.empty(0)


def flush_buffer() -> torch.Tensor:
    """Read before every replay: twice what the L2 cache holds. Reading leaves nothing to be written back."""
    size = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    return torch.zeros(2 * size // 4, dtype=torch.int32, device="cuda")


def paged(pages: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V views of pages in vLLM's layout, K and V side by side in the last dimension."""
    cache = torch.empty(
        (pages, PAGE, shape.kv_heads, 2 * shape.head_size), dtype=torch.bfloat16, device="cuda"
    )
    for part in cache.split(16384):
        part.normal_()
    return cache[..., : shape.head_size], cache[..., shape.head_size :]


def table(positions: int, shape: Shape) -> torch.Tensor:
    """cos and sin in bf16, as vLLM keeps them."""
    made = reference.cos_sin_table(positions, shape.head_size, torch.bfloat16, "cuda")
    assert made is not None
    return made


@dataclass
class GatherCase:
    """Pages to gather: 4 groups out of one pool, in random order."""

    shape: Shape
    tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        pages, groups = self.tokens // PAGE, 4
        self.pages_of = [pages // groups] * groups
        self.key, self.value = paged(2 * pages, self.shape)
        self.blocks = torch.randperm(2 * pages, device="cuda")[:pages].to(torch.int32)
        self.blocks = self.blocks.view(groups, pages // groups)
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.rows = torch.arange(groups, **ints)
        self.pages = torch.tensor(self.pages_of, **ints)
        self.offsets = self.rows * (pages // groups)
        self.table = table(self.tokens // groups, self.shape)
        out = torch.full_like(self.key[:pages], float("nan"))
        self.key_out, self.value_out = out, torch.full_like(out, float("nan"))

    def run(self, config: GatherConfig | None = None) -> None:
        gather_rotate(
            self.key,
            self.value,
            self.blocks,
            self.rows,
            self.pages,
            self.offsets,
            self.pages_of[0],
            self.key_out,
            self.value_out,
            self.table,
            True,
            config=config,
        )

    def check(self) -> None:
        """Every element of every group against float64."""
        self.run()
        per_group = self.pages_of[0] * PAGE
        positions = torch.arange(per_group, device="cuda")
        for group, blocks in enumerate(self.blocks):
            place = slice(group * self.pages_of[0], (group + 1) * self.pages_of[0])
            raw = self.key[blocks.long()].flatten(0, 1)
            want = reference.rotate(raw, positions, self.table, True)
            error = reference.relative_error(self.key_out[place].flatten(0, 1), want)
            assert error < 4e-3, f"gather K is off by {error}"
            assert torch.equal(self.value_out[place], self.value[blocks.long()]), "gather V differs"


@dataclass
class DecodeCase:
    """A batch of decode rows over pages in random order."""

    shape: Shape
    batch: int
    context: int
    lengths: list[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        pages = self.context // PAGE
        self.key, self.value = paged(self.batch * pages, self.shape)
        order = torch.randperm(self.batch * pages, device="cuda").to(torch.int32)
        self.blocks = order.view(self.batch, pages)
        self.lengths = self.lengths or [self.context - 3] * self.batch
        self.lens = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        size = (self.batch, self.shape.q_heads, self.shape.head_size)
        self.query = torch.randn(size, dtype=torch.bfloat16, device="cuda")
        self.out = torch.full_like(self.query, float("nan"))
        self.table = table(self.context, self.shape)
        self.scale = self.shape.head_size**-0.5
        self.starts = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda")

    def workspace(self, config: DecodeConfig | None = None) -> DecodeWorkspace:
        """For this batch; the longest row is as long as an engine would allow, not as long as this one."""
        shape = self.shape
        return DecodeWorkspace.create(
            max(256, self.batch),
            shape.kv_heads,
            shape.q_heads // shape.kv_heads,
            shape.head_size,
            131072,
            "cuda",
            kv_dtype=self.key.dtype,
            config=config,
        )

    def spans(self, workspace: DecodeWorkspace, rotate: bool = True) -> None:
        decode_attention(
            self.query,
            self.key,
            self.value,
            self.blocks,
            self.lens,
            self.table if rotate else None,
            True,
            self.scale,
            self.out,
            workspace,
        )

    def flash(self, ahead: bool = True) -> Callable[[], None]:
        """Stock FlashAttention 3 on K as if it were rotated.

        Args:
            ahead: As vLLM's backend does it under full CUDA graphs: the schedule is made once a step, outside of the
                layers, with a bound on the splits. Otherwise the kernel's own heuristics.

        Returns:
            The call to be timed.
        """
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        schedule, splits = None, 0
        if ahead:
            splits = FLASH_SPLITS
            schedule = get_scheduler_metadata(
                batch_size=self.batch,
                max_seqlen_q=1,
                max_seqlen_k=self.context,
                num_heads_q=self.shape.q_heads,
                num_heads_kv=self.shape.kv_heads,
                headdim=self.shape.head_size,
                cache_seqlens=self.lens,
                qkv_dtype=torch.bfloat16,
                cu_seqlens_q=self.starts,
                page_size=PAGE,
                causal=True,
                num_splits=splits,
            )

        def call() -> None:
            flash_attn_varlen_func(
                q=self.query,
                k=self.key,
                v=self.value,
                out=self.out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=1,
                seqused_k=self.lens,
                max_seqlen_k=self.context,
                softmax_scale=self.scale,
                causal=True,
                block_table=self.blocks,
                fa_version=3,
                scheduler_metadata=schedule,
                num_splits=splits,
            )

        return call

    def unified(self) -> Callable[[], None]:
        """vLLM's Triton attention, with the split-KV buffers that its backend gives it."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        heads, segments = self.shape.q_heads, 16
        width = triton.next_power_of_2(self.shape.head_size)
        floats = {"dtype": torch.float32, "device": "cuda"}
        buffers = {
            "seq_threshold_3D": 128 // self.shape.kv_heads,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(self.batch, heads, segments, width, **floats),
            "softmax_segm_max": torch.empty(self.batch, heads, segments, **floats),
            "softmax_segm_expsum": torch.empty(self.batch, heads, segments, **floats),
        }

        def call() -> None:
            unified_attention(
                q=self.query,
                k=self.key,
                v=self.value,
                out=self.out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=1,
                seqused_k=self.lens,
                max_seqlen_k=self.context,
                softmax_scale=self.scale,
                causal=True,
                window_size=(-1, -1),
                block_table=self.blocks,
                softcap=0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                **buffers,
            )

        return call

    def check(self, config: DecodeConfig | None = None) -> float:
        """Largest relative error of a row against float64."""
        self.out.fill_(float("nan"))
        self.spans(self.workspace(config))
        attention = reference.Attention(self.table, True, self.scale)
        worst = 0.0
        assert self.lengths is not None
        for row in range(min(self.batch, 8)):
            length = self.lengths[row]
            if length == 0:
                assert (self.out[row] == 0).all(), "a padding row is not zero"
                continue
            # One advanced index instead of the reference's loop over pages.
            blocks = self.blocks[row, : -(-length // PAGE)].long()
            local = torch.arange(len(blocks), dtype=torch.int32, device="cuda")[None]
            want = reference.decode(
                self.query[row : row + 1],
                self.key[blocks],
                self.value[blocks],
                local,
                [length],
                attention,
            )
            error = reference.relative_error(self.out[row : row + 1], want)
            assert error < 1.5e-2, f"row {row} of {length} tokens is off by {error}"
            worst = max(worst, error)
        return worst
