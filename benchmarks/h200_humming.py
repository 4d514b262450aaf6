"""Humming (PyPI `humming-kernels`) beside ours in one process: nvfp4 x bfloat16, grouped, microseconds.

    python benchmarks/h200_humming.py [--shapes "qwen3 gate/up,..."] [--tokens 8,32,128,512,2048,8192]

Method as in h200_hopper.py: CUDA-graph replays, every launch with another routing. Humming compiles a kernel
for each size, which takes seconds.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from h200_hopper import ROUTINGS, median_us, random_weight
from humming.layer import HummingLayer

from fp4_ops.sm90 import ops

SHAPES = {
    "qwen3 gate/up": (128, 1536, 2048, 8),
    "qwen3 down": (128, 2048, 768, 8),
    "dsv3 gate/up": (32, 4096, 7168, 1),
    "mixtral gate/up": (8, 28672, 4096, 2),
}
"""Experts, n, k, rows a token."""


def humming(groups: int, n: int, k: int) -> HummingLayer:
    layer = HummingLayer(
        shape_n=n, shape_k=k, num_experts=groups, torch_dtype=torch.bfloat16,
        weight_config={"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16},
    ).cuda()  # fmt: skip
    layer.load_from_unquantized(torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16))
    layer.transform()
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="8,32,128,512,2048,8192")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':16}{'tokens':>7}{'ours':>9}{'Humming':>9}")
    for name in given.shapes.split(","):
        groups, n, k, top_k = SHAPES[name]
        theirs, ours = humming(groups, n, k), random_weight(groups, n, k)
        for tokens in map(int, given.tokens.split(",")):
            rows = tokens * top_k
            counts = [
                torch.bincount(torch.randint(0, groups, (rows,), device="cuda"), minlength=groups)
                for _ in range(ROUTINGS)
            ]
            ends = [c.cumsum(0) for c in counts]
            layout = [F.pad(e, (1, 0)) for e in ends]
            offs = [e.int() for e in ends]
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            config = {"gemm_type": "grouped_contiguous"}
            a = median_us(lambda i: ops.grouped_mm(x, None, ours, offs[i], torch.bfloat16))  # noqa: B023
            b = median_us(lambda i: theirs(x, expert_layout=layout[i], compute_config=config))  # noqa: B023
            print(f"{name:16}{tokens:>7}{a:9.1f}{b:9.1f}", flush=True)


if __name__ == "__main__":
    main()
