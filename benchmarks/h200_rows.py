"""Measures decode and prefill by rows per expert, in microseconds, and shows which of them the planner
(csrc/cuda/choice.cpp) takes.

    python benchmarks/h200_rows.py [--rows 0.25,1,2,...] [--format mxfp4]

The weights are in nvfp4 (or mxfp4). The script runs four models' products with random routing, dense
products, and the models' blocks. `16` is bfloat16 rows with weights in layout sm90, where a separate pass
reorders the rows for prefill. `bf16` is bfloat16 rows with layout mma_bf16, and `8` is fp8 rows that were
quantised before. `decodes` says which kernel the operators take. A block in `auto` is decode of unquantised
rows, or prefill of fp8 rows. `rows` is the number of rows per expert.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import hopper_operators as ops
import record
import torch
from h200_hopper import MODELS, ROUTINGS, Model, median_us, random_weight, routing

from fp4_ops.backends.launchers import rows as row_kernels
from fp4_ops.dev.product import Routing
from fp4_ops.runtime import native

LAYOUTS = ("sm90", "mma_bf16")
BLOCKS = (("sm90", "none"), ("mma_bf16", "none"), ("sm90", "fp8"), ("sm90", "auto"))
DENSE = ((2048, 768), (4096, 4096), (5760, 2880), (28672, 4096), (4096, 14336), (8192, 8192))


def both(run) -> tuple[float, float]:
    times = []
    for kernel in ("decode", "prefill"):
        with native.only(kernel):
            times.append(median_us(run, pause=0.05))
    return times[0], times[1]


def row(table: str, shape: tuple[int, int, int], each: float, kind: str, run, decodes: bool) -> record.Row:
    decode_us, prefill_us = both(run)
    groups, n, k = shape
    return {
        "table": table, "experts": groups, "n": n, "k": k, "rows": each, "kind": kind,
        "decode_us": decode_us, "prefill_us": prefill_us, "decodes": decodes,
    }  # fmt: skip


def products(
    groups: int, n: int, k: int, format: str, each: float, offs: list[torch.Tensor] | None, m: int
) -> Iterator[record.Row]:
    copies = ROUTINGS if offs is None else 1
    sm90, wide = ([random_weight(groups, n, k, layout, format) for _ in range(copies)] for layout in LAYOUTS)
    x = torch.randn(m, k, device="cuda").bfloat16()
    codes, scale = row_kernels.quantize_fp8(x)
    mode = Routing.DENSE if offs is None else Routing.OFFS
    ways = (("16", x, None, sm90), ("bf16", x, None, wide), ("8", codes, scale, sm90))
    for kind, a, a_scale, weights in ways:

        def run(i: int) -> None:
            if offs is None:
                ops.mm(a, a_scale, weights[i], torch.bfloat16)  # noqa: B023
            else:
                ops.grouped_mm(a, a_scale, weights[0], offs[i], torch.bfloat16)  # noqa: B023

        chosen = ops.decodes(a, weights[0], mode, m)
        yield row("dense" if offs is None else "product", (groups, n, k), each, kind, run, chosen)


def block(model: Model, weights, each: float) -> Iterator[record.Row]:
    tokens = max(round(each * model.experts / max(model.top_k, 1)), 1)
    ids = [routing(model, tokens) for _ in range(ROUTINGS)]
    x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
    scores = torch.rand(tokens, ids[0].shape[1], device="cuda")
    for layout, a_format in BLOCKS:
        up, down = weights[layout]

        def run(i: int) -> None:
            args = (x, ids[i], scores, up, down, "silu_interleaved", a_format, torch.bfloat16)  # noqa: B023
            ops.moe(*args)

        chosen = ops.block_decodes(up, down, ids[0].numel(), a_format, x.device)
        kind = "none bf16" if layout == "mma_bf16" else a_format
        yield row("block", (model.experts, 2 * model.inter, model.hidden), each, kind, run, chosen)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", default="0.0625,0.125,0.25,0.5,1,2,3,4,6,8,12,16,32")
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "mxfp4"))


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    each_rows, format = [float(r) for r in given.rows.split(",")], given.format
    for model in MODELS:
        for n, k in ((2 * model.inter, model.hidden), (model.hidden, model.inter)):
            for each in each_rows:
                m = max(round(each * model.experts), 1)
                ids = [torch.randint(0, model.experts, (m,), device="cuda") for _ in range(ROUTINGS)]
                offs = [torch.bincount(i, minlength=model.experts).cumsum(0).int() for i in ids]
                yield from products(model.experts, n, k, format, each, offs, m)
    for n, k in DENSE:
        for each in each_rows:
            if each >= 1:
                yield from products(1, n, k, format, each, None, round(each))
    for model in MODELS:
        shapes = (2 * model.inter, model.hidden), (model.hidden, model.inter)
        weights = {
            to: [random_weight(model.experts, *shape, to, format) for shape in shapes] for to in LAYOUTS
        }
        for each in each_rows:
            yield from block(model, weights, each)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
