"""Decode attention with fused rotation against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.kernels import reference
from vllm_spans.attention.kernels.decode import DecodeWorkspace, decode_attention
from vllm_spans.attention.kernels.launch import DecodeConfig

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SMALL = DecodeConfig(tokens=16, heads=2, warps=4, stages=2, programs=4)


@dataclass(frozen=True)
class Case:
    """One shape and what is asked of it."""

    head_size: int = 64
    kv_heads: int = 2
    group: int = 4
    block_size: int = 16
    rotary_dim: int | None = None
    is_neox: bool = True
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    layout: str = "NHD"
    seq_lens: tuple[int, ...] = (70, 0, 200, 1)
    max_seq_len: int = 512
    window_left: int = -1
    scale: float | None = None
    query_scale: float = 1.0
    softcap: float = 0.0
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    config: DecodeConfig | None = SMALL


def run(
    case: Case, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, DecodeWorkspace]:
    """The kernel's output, the reference's, and the workspace that was used."""
    generator = torch.Generator().manual_seed(seed)
    rows, heads = len(case.seq_lens), case.kv_heads * case.group
    columns = -(-case.max_seq_len // case.block_size)
    used = [-(-length // case.block_size) for length in case.seq_lens]
    blocks = sum(used) + 2
    key, value = reference.paged_kv(
        blocks,
        case.block_size,
        case.kv_heads,
        case.head_size,
        case.kv_dtype or case.dtype,
        case.layout,
        device,
        generator,
    )
    # Columns past a row's end hold a block that does not exist: reading it is an error.
    block_table = torch.full((rows, columns), 1 << 28, dtype=torch.int32)
    free = torch.randperm(blocks, generator=generator).to(torch.int32)
    for row, pages in enumerate(used):
        block_table[row, :pages], free = free[:pages], free[pages:]
    # What no row has written is not a number, in used blocks and in others.
    for cache in (key, value):
        raw = cache.view(torch.uint8) if cache.dtype in reference.FP8 else cache
        for block in free:
            raw[block] = 0x7F if raw is not cache else torch.nan
        for row, length in enumerate(case.seq_lens):
            if length % case.block_size:
                last = block_table[row, used[row] - 1]
                raw[last, length % case.block_size :] = 0x7F if raw is not cache else torch.nan
    block_table = block_table.to(device)
    rotary_dim = case.head_size if case.rotary_dim is None else case.rotary_dim
    table = reference.cos_sin_table(case.max_seq_len, rotary_dim, torch.float32, device)
    query = torch.randn(rows, heads, case.head_size, generator=generator) * case.query_scale
    query = query.to(device, case.dtype)
    sinks = torch.randn(heads, generator=generator).to(device) if case.sinks else None
    attention = reference.Attention(
        table,
        case.is_neox,
        case.scale or case.head_size**-0.5,
        case.window_left,
        case.softcap,
        sinks,
        case.k_scale,
        case.v_scale,
    )
    workspace = DecodeWorkspace.create(
        rows + 3,
        case.kv_heads,
        case.group,
        case.head_size,
        case.max_seq_len,
        device,
        kv_dtype=key.dtype,
        query_dtype=query.dtype,
        config=case.config,
    )
    for buffer in (workspace.accumulators, workspace.maxima, workspace.sums):
        buffer.fill_(float("nan"))
    workspace.pieces_of_row.fill_(1 << 28)
    output = torch.full_like(query, float("nan"))
    decode_attention(
        query,
        key,
        value,
        block_table,
        torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        table,
        case.is_neox,
        attention.scale,
        output,
        workspace,
        window_left=case.window_left,
        softcap=case.softcap,
        sinks=sinks,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    want = reference.decode(query, key, value, block_table, list(case.seq_lens), attention)
    return output, want, workspace


def check(case: Case, device: str, seed: int = 0) -> None:
    """Compare with the reference row by row, so that a wrong short row does not hide behind long ones."""
    output, want, _ = run(case, device, seed)
    for row, length in enumerate(case.seq_lens):
        if length == 0:
            assert (output[row] == 0).all()
        else:
            error = reference.relative_error(output[row], want[row])
            assert error < TOLERANCE[case.dtype], f"row {row} of {length} tokens"


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_head_sizes(head_size: int, is_neox: bool, device: str) -> None:
    """Head sizes that are no power of two are masked, not padded."""
    check(Case(head_size=head_size, is_neox=is_neox), device)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [0, 16, 24, 40])
def test_partial_rotary(rotary_dim: int, is_neox: bool, device: str) -> None:
    """Elements past the rotary dim take part as they are."""
    check(Case(rotary_dim=rotary_dim, is_neox=is_neox), device)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "warps"),
    [(256, 64, 4), (256, 250, 2), (256, 16, 8), (160, 160, 4), (512, 512, 8), (144, 0, 4)],
)
def test_slices_of_wide_heads(
    head_size: int, rotary_dim: int, warps: int, is_neox: bool, device: str
) -> None:
    """Pairs stay together in a slice; slices may be partly or wholly padding, and lie in fewer warps or more."""
    config = DecodeConfig(16, 2, warps, 2, 2)
    case = Case(
        head_size=head_size,
        rotary_dim=rotary_dim,
        is_neox=is_neox,
        config=config,
        seq_lens=(70, 0, 33),
    )
    check(case, device)


@pytest.mark.parametrize(
    ("kv_heads", "group"), [(1, 1), (8, 1), (8, 4), (3, 2), (4, 7), (2, 8), (1, 16), (1, 32)]
)
def test_head_groups(kv_heads: int, group: int, device: str) -> None:
    """Tiles shared by several KV heads, one head of many queries, and groups that fill no power of two."""
    check(Case(kv_heads=kv_heads, group=group, seq_lens=(130, 0, 33)), device)


@pytest.mark.parametrize("layout", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype, device: str) -> None:
    """Any physical order of the cache, any dtype of the model."""
    check(Case(layout=layout, dtype=dtype, kv_heads=4), device)


@pytest.mark.parametrize("kv_dtype", reference.FP8, ids=str)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_fp8_is_dequantised(kv_dtype: torch.dtype, rotary_dim: int, device: str) -> None:
    """The scales reach scores and output."""
    for dtype in (torch.bfloat16, torch.float32):
        case = Case(dtype=dtype, kv_dtype=kv_dtype, rotary_dim=rotary_dim, k_scale=0.5, v_scale=2.0)
        check(case, device)


@pytest.mark.parametrize(
    ("head_size", "rotary_dim"), [(64, 64), (64, 32), (64, 0), (256, 64)], ids=str
)
@pytest.mark.parametrize("kv_dtype", reference.FP8, ids=str)
def test_fp8_with_queries_past_the_range_of_fp16(
    kv_dtype: torch.dtype, head_size: int, rotary_dim: int, device: str
) -> None:
    """Elements of K are fp16 on the way, queries of a bf16 model may be larger; gptj pairs too."""
    case = Case(
        head_size=head_size,
        rotary_dim=rotary_dim,
        is_neox=False,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        query_scale=1e6,
        scale=1e-6 * head_size**-0.5,
    )
    check(case, device)


@pytest.mark.parametrize("window_left", [0, 1, 15, 63, 64, 150, 1000])
def test_sliding_window(window_left: int, device: str) -> None:
    """The window is by absolute position, and chunks outside it do not run."""
    check(Case(window_left=window_left, seq_lens=(70, 0, 300, 1, 64)), device)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sinks": True}], ids=str)
def test_softcap_and_sinks(options: dict[str, object], device: str) -> None:
    """Alone and with a window."""
    check(Case(**options), device)
    check(Case(**options, window_left=40), device)
    check(Case(softcap=2.0, sinks=True, dtype=torch.bfloat16), device)


def test_large_scores_stay_finite(device: str) -> None:
    """Softcap's tanh and the softmax do not overflow."""
    output, want, _ = run(Case(softcap=30.0, scale=50.0, seq_lens=(100, 7)), device)
    assert output.isfinite().all()
    assert reference.relative_error(output, want) < 1e-4


@pytest.mark.parametrize(
    "seq_lens",
    [
        (0, 0, 0),
        (1,),
        (512,),
        (512, 1, 1, 1, 1, 1),
        (15, 16, 17, 31, 32, 33, 63, 64, 65),
        (0, 400, 0, 0, 90, 0),
    ],
    ids=str,
)
def test_ragged_batches(seq_lens: tuple[int, ...], device: str) -> None:
    """Rows of any mixture of lengths, padding rows among them."""
    check(Case(seq_lens=seq_lens), device, seed=len(seq_lens))


@pytest.mark.parametrize(
    ("tokens", "heads", "warps", "programs"),
    [(16, 1, 1, 1), (32, 1, 4, 1), (32, 2, 4, 2), (16, 4, 4, 16), (64, 4, 4, 1), (16, 4, 2, 4)],
)
def test_launch_shapes(tokens: int, heads: int, warps: int, programs: int, device: str) -> None:
    """How work is cut and which head and token a warp takes does not change the result."""
    config = DecodeConfig(tokens, heads, warps, 3, programs, registers=168)
    check(Case(config=config, kv_heads=4, seq_lens=(300, 0, 512, 64, 65, 8)), device)


@pytest.mark.parametrize(
    ("kv_heads", "heads"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4)], ids=str
)
def test_heads_of_a_program_divide_the_heads_of_the_rank(kv_heads: int, heads: int) -> None:
    """One table of launch shapes serves every degree of tensor parallelism."""
    assert DecodeConfig(16, 4, 4, 2, 2).heads_of(kv_heads) == heads


@pytest.mark.parametrize(
    "options",
    [
        {"rotary_dim": 0},
        {"rotary_dim": 32, "is_neox": False},
        {"window_left": 70},
        {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16, "k_scale": 0.5},
        {"softcap": 5.0, "sinks": True},
        {"group": 32},
    ],
    ids=str,
)
def test_runs_of_one_head(options: dict[str, object], device: str) -> None:
    """Runs that saw nothing do not disturb those that did, whatever a tile is made of."""
    config = DecodeConfig(16, 1, 8, 2, 2)
    check(Case(config=config, kv_heads=1, seq_lens=(1, 0, 17, 130, 400), **options), device)


@pytest.mark.parametrize("block_size", [8, 24, 32, 256])
def test_block_sizes(block_size: int, device: str) -> None:
    """Tiles cross pages, and pages hold several tiles."""
    check(Case(block_size=block_size, seq_lens=(70, 0, 300)), device)


@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("programs", [1, 3, 16])
def test_pieces_have_places_of_their_own(programs: int, window_left: int, device: str) -> None:
    """However lengths are mixed, pieces of rows lie apart, in order and inside the workspace."""
    generator = torch.Generator().manual_seed(programs)
    config = DecodeConfig(16, 1, 1, 2, programs)
    for _ in range(3):
        lengths = torch.randint(0, 300, (5,), generator=generator)
        lengths[torch.rand(5, generator=generator) < 0.3] = 0
        case = Case(
            config=config,
            kv_heads=1,
            seq_lens=tuple(lengths.tolist()),
            window_left=window_left,
            max_seq_len=320,
        )
        _, _, workspace = run(case, device)
        end = 0
        for length, (first, count) in zip(
            case.seq_lens, workspace.pieces_of_row.tolist(), strict=False
        ):
            if length:
                assert count >= 1
                assert end <= first
                end = first + count
        assert end <= workspace.accumulators.shape[0]


def test_refuses_what_it_would_misread(device: str) -> None:
    """A shape or dtype that does not fit is an error, not wrong numbers."""
    cache = torch.zeros(4, 16, 2, 64, device=device)
    query = torch.zeros(2, 8, 64, device=device)
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.create(2, 2, 4, 64, 64, device)

    def call(query=query, key=cache, table=table, work=workspace) -> None:
        decode_attention(query, key, key, table, lens, None, True, 1.0, query.clone(), work)

    call()
    with pytest.raises(ValueError, match="do not fit a workspace"):
        call(work=DecodeWorkspace.create(2, 4, 2, 64, 64, device))
    with pytest.raises(ValueError, match="rows do not fit"):
        call(work=DecodeWorkspace.create(1, 2, 4, 64, 64, device))
    with pytest.raises(ValueError, match="does not fit KV"):
        call(query=query.half())
    with pytest.raises(ValueError, match="contiguous"):
        call(table=table.t().contiguous().t())
    with pytest.raises(ValueError, match="positive"):
        DecodeWorkspace.create(0, 2, 4, 64, 64, device)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window_left": 4095}, {"layout": "HND"}], ids=str)
def test_long_requests(options: dict[str, object], device: str) -> None:
    """Sizes that the engine runs, with the configuration that it runs them with."""
    case = Case(
        head_size=128,
        kv_heads=8,
        dtype=torch.bfloat16,
        seq_lens=(32768, 0, 1, 4097, 16000, 5),
        max_seq_len=32768,
        config=None,
        **options,
    )
    check(case, device)


@pytest.mark.gpu
def test_graph_replays_with_other_lengths(device: str) -> None:
    """A captured call follows the lengths that the device holds at replay."""
    case = Case(kv_heads=8, head_size=128, dtype=torch.bfloat16, max_seq_len=4096)
    generator = torch.Generator().manual_seed(0)
    rows = 4
    key, value = reference.paged_kv(rows * 256, 16, 8, 128, case.dtype, "NHD", device, generator)
    block_table = torch.randperm(rows * 256, generator=generator).to(torch.int32)
    block_table = block_table.view(rows, 256).to(device)
    table = reference.cos_sin_table(4096, 128, torch.float32, device)
    query = torch.randn(rows, 32, 128, generator=generator).to(device, case.dtype)
    output = torch.empty_like(query)
    seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.create(rows, 8, 4, 128, 4096, device)

    def call() -> None:
        decode_attention(
            query, key, value, block_table, seq_lens, table, True, 0.1, output, workspace
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ([4096, 1, 0, 77], [3, 0, 0, 0], [1000, 2000, 3000, 4000]):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        output.fill_(float("nan"))
        graph.replay()
        want = reference.decode(
            query, key, value, block_table, lengths, reference.Attention(table, True, 0.1)
        )
        assert reference.relative_error(output, want) < TOLERANCE[case.dtype]
