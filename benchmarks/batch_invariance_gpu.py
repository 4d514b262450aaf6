"""Measures the cost of batch invariance on a Hopper GPU: `fp4::moe` with and without it, in one process.

    python benchmarks/batch_invariance_gpu.py [--models qwen3-30b,...] [--tokens 1,8,...]

Each time is the median of CUDA-graph replays over several random routings of nvfp4 weights and bf16 rows.
`auto_us` is layout sm90 with a_format "auto", the default. `exact_us` is layout mma_bf16, rows in bf16.
`invariant_us` is layout mma_bf16_invariant, the default with batch_invariant=True; `cost` is its time over
exact_us, `cost_auto` over auto_us. Before it is timed, a token alone is compared bit for bit with the same
token in the batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import record
import torch
from gpu_ops import DEVICE, MODELS, Model, median_us, random_weight, routings
from torch import Tensor

WAYS = {"auto": ("sm90", "auto"), "exact": ("mma_bf16", "none"), "invariant": ("mma_bf16_invariant", "none")}
FORMAT = "nvfp4"
GATE = "silu_interleaved"
"""The activation, as in prepared models."""


def block(way: str, x: Tensor, scores: Tensor, operands: tuple[Tensor, ...], ids: Tensor) -> Tensor:
    layout, a_format = WAYS[way]
    return torch.ops.fp4.moe(
        x, ids, scores, *operands, format=FORMAT, layout=layout, activation=GATE, a_format=a_format
    )


def measure(m: Model, plain: list, tokens: int) -> dict[str, float]:
    x = torch.randn(tokens, m.hidden, device=DEVICE, dtype=torch.bfloat16)
    scores, ids = torch.rand(tokens, m.top_k, device=DEVICE), routings(tokens, m)
    found = {}
    for way, (layout, _) in WAYS.items():
        operands = [t for w in plain for t in torch.ops.fp4.prepack(*w, FORMAT, layout)]
        if way == "invariant":
            some = torch.randint(tokens, (1,), device=DEVICE)
            alone = block(way, x[some], scores[some], operands, ids[0][some])
            assert torch.equal(alone, block(way, x, scores, operands, ids[0])[some])
        found[f"{way}_us"] = median_us([partial(block, way, x, scores, operands, i) for i in ids])
    found["cost"] = found["invariant_us"] / found["exact_us"]
    found["cost_auto"] = found["invariant_us"] / found["auto_us"]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="qwen3-30b,mixtral-8x7b")
    parser.add_argument("--tokens", default="1,8,64,512,2048,8192")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    for name in args.models.split(","):
        m = MODELS[name]
        plain = [
            random_weight(m.experts, n, k, FORMAT) for n, k in ((2 * m.inter, m.hidden), (m.hidden, m.inter))
        ]
        for tokens in map(int, args.tokens.split(",")):
            yield {"table": "batch_invariance", "model": name, "tokens": tokens, **measure(m, plain, tokens)}


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
