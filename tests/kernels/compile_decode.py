"""Compile the decode kernel for a GPU that is not there and print the shared memory that it takes, as JSON.

    python -m tests.kernels.compile_decode CAPABILITY CASES

``CASES`` is a JSON list of objects: the KV dtype (as Triton calls it), head size, rotary dim, group, and limit of
shared memory. A process of its own: where there is no GPU the tests run under Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_spans.attention.kernels.decode import DecodeWorkspace, pieces_constants
from vllm_spans.attention.kernels.decode_kernels import decode_pieces_kernel
from vllm_spans.attention.kernels.launch import choose_launch
from vllm_spans.attention.kernels.rotation import HeadSplit

DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
TYPES = {
    **dict.fromkeys(("table", "seq_lens", "pieces_of_row"), "*i32"),
    **dict.fromkeys(("accumulators", "maxima", "sums"), "*fp32"),
    **dict.fromkeys(("score_scale", "softcap"), "fp32"),
}


def shared_bytes(
    capability: int, dtype: str, head_size: int, rotary_dim: int, group: int, limit: int
) -> dict[str, int]:
    """What the compiled kernel takes, and the bound."""
    workspace = DecodeWorkspace.create(64, 8, group, head_size, 4096, "cpu", kv_dtype=DTYPES[dtype])
    launch = choose_launch(8, group, workspace.launch.head_padded, DTYPES[dtype].itemsize, limit)
    workspace = replace(workspace, launch=launch)
    table = torch.empty(1, rotary_dim) if rotary_dim else None
    split = HeadSplit.of(head_size, table, smallest=16, slices=launch.slices)
    constants = pieces_constants(
        workspace, workspace.max_rows, split, 16, True, DTYPES[dtype], -1, False
    )
    query = "fp32" if dtype == "fp32" else "bf16"
    types = {**TYPES, "query": f"*{query}", "key": f"*{dtype}", "value": f"*{dtype}"}
    types["cos_sin"] = "*fp32"
    signature: dict[str, str] = {}
    values: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, name in enumerate(decode_pieces_kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if name not in ("score_scale", "softcap", "rows", "last_position"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(decode_pieces_kernel, signature, values, attributes)
    options = {"num_warps": launch.config.warps, "maxnreg": launch.config.registers or None}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"compiled": compiled.metadata.shared, "bound": launch.shared_bytes}


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    print(json.dumps([shared_bytes(int(sys.argv[1]), **case) for case in cases]))
