"""Compares grouped products of Humming (PyPI `humming-kernels`) with ours in one process, in microseconds.

    python benchmarks/h200_humming.py [--shapes "qwen3 gate/up,..."] [--rows bf16,fp8] [--tokens 32,128,...]

Our weights are in nvfp4 and in mxfp4. Humming's are in nvfp4 for bf16 rows, and in mxfp4 for fp8 rows
(quantised before), because it has no nvfp4 kernels for them. The method is that of h200_hopper.py: CUDA-graph
replays, and every launch has another routing. Humming compiles a kernel for each size, which takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import hopper_operators as ops
import record
import torch
import torch.nn.functional as F
from h200_hopper import ROUTINGS, median_us, random_weight
from humming.forward import may_process_input
from humming.layer import HummingLayer

from fp4_ops.backends.launchers import rows as row_kernels

SHAPES = {
    "qwen3 gate/up": (128, 1536, 2048, 8),
    "qwen3 down": (128, 2048, 768, 8),
    "gpt-oss gate/up": (128, 5760, 2880, 4),
    "gpt-oss down": (128, 2880, 2880, 4),
    "dsv3 gate/up": (32, 4096, 7168, 1),
    "dsv3 down": (32, 7168, 2048, 1),
    "mixtral gate/up": (8, 28672, 4096, 2),
    "mixtral down": (8, 4096, 14336, 2),
}
"""Experts, n, k, rows per token."""
SCALES = {
    "bf16": {"scale_dtype": "float8e4m3", "group_size": 16},
    "fp8": {"scale_dtype": "float8e8m0", "group_size": 32},
}
INPUTS = {"bf16": "bfloat16", "fp8": "float8e4m3"}


def humming(groups: int, n: int, k: int, kind: str) -> HummingLayer:
    layer = HummingLayer(
        shape_n=n, shape_k=k, num_experts=groups, torch_dtype=torch.bfloat16,
        weight_config={"dtype": "float4e2m1", **SCALES[kind]}, input_config={"dtype": INPUTS[kind]},
    ).cuda()  # fmt: skip
    layer.load_from_unquantized(torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16))
    layer.transform()
    return layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(INPUTS))
    parser.add_argument("--tokens", default="8,32,128,512,2048,8192")


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    for name in given.shapes.split(","):
        groups, n, k, top_k = SHAPES[name]
        for kind in given.rows.split(","):
            theirs, to = humming(groups, n, k, kind), "mma_bf16" if kind == "bf16" else "sm90"
            ours = [random_weight(groups, n, k, to, format) for format in ("nvfp4", "mxfp4")]
            for tokens in map(int, given.tokens.split(",")):
                m = tokens * top_k
                counts = [
                    torch.bincount(torch.randint(0, groups, (m,), device="cuda"), minlength=groups)
                    for _ in range(ROUTINGS)
                ]
                ends = [c.cumsum(0) for c in counts]
                layout = [F.pad(e, (1, 0)) for e in ends]
                offs = [e.int() for e in ends]
                x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                a, a_scale = (x, None) if kind == "bf16" else row_kernels.quantize_fp8(x)
                b, _, b_scale = may_process_input(theirs.humming_config, x)
                us = [
                    median_us(lambda i: ops.grouped_mm(a, a_scale, w, offs[i], torch.bfloat16))  # noqa: B023
                    for w in ours
                ]
                given_b = {"input_scale": b_scale, "compute_config": {"gemm_type": "grouped_contiguous"}}
                peer = lambda i: theirs(b, expert_layout=layout[i], **given_b)  # noqa: E731, B023
                yield {
                    "table": "product", "shape": name, "experts": groups, "n": n, "k": k, "rows": kind,
                    "tokens": tokens, "nvfp4_us": us[0], "mxfp4_us": us[1], "humming_us": median_us(peer),
                }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
