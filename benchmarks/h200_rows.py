"""Decode and prefill by rows an expert, us, and which of them fp4_ops/sm90/choice.py takes.

    python benchmarks/h200_rows.py [--rows 0.25,1,2,...] [--format mxfp4]

nvfp4 (or mxfp4), four models' products with random routing, dense products, and the models' blocks. `16` and
`bf16` are bfloat16 rows and weights in layout sm90, for whose prefill a pass puts them in order, and
sm90_bf16; `8` fp8 rows, quantised before. `*` is the one that the operators take. A block in `auto` is decode
of the rows as they are, or prefill of fp8 ones.
"""

from __future__ import annotations

import argparse

import torch
from h200_hopper import MODELS, ROUTINGS, Model, median_us, random_weight, routing

from fp4_ops.sm90 import choice, ops
from fp4_ops.sm90.decode import Routing

LAYOUTS = ("sm90", "sm90_bf16")
BLOCKS = (("sm90", "none"), ("sm90_bf16", "none"), ("sm90", "fp8"), ("sm90", "auto"))
DENSE = ((2048, 768), (4096, 4096), (5760, 2880), (28672, 4096), (4096, 14336), (8192, 8192))


def both(run) -> tuple[float, float]:
    times = []
    for kernel in ("decode", "prefill"):
        with choice.only(kernel):
            times.append(median_us(run, pause=0.05))
    return times[0], times[1]


def show(times: tuple[float, float], decodes: bool) -> str:
    return "".join(f"{us:9.1f}{'*' if first == decodes else ' '}" for us, first in zip(times, (True, False)))


def line(groups: int, n: int, k: int, each: float, columns: list[str]) -> None:
    print(f"{groups:>5}{n:>7}{k:>7}{each:>7g}" + "".join(columns), flush=True)


def products(
    groups: int, n: int, k: int, format: str, each: float, offs: list[torch.Tensor] | None, m: int
) -> None:
    copies = ROUTINGS if offs is None else 1
    sm90, wide = ([random_weight(groups, n, k, layout, format) for _ in range(copies)] for layout in LAYOUTS)
    x = torch.randn(m, k, device="cuda").bfloat16()
    codes, scale = ops.rows.quantize_fp8(x)
    mode = Routing.DENSE if offs is None else Routing.OFFS
    columns = []
    for a, a_scale, weights in ((x, None, sm90), (x, None, wide), (codes, scale, sm90)):

        def run(i: int) -> None:
            if offs is None:
                ops.mm(a, a_scale, weights[i], torch.bfloat16)  # noqa: B023
            else:
                ops.grouped_mm(a, a_scale, weights[0], offs[i], torch.bfloat16)  # noqa: B023

        columns.append(show(both(run), ops.decodes(a, weights[0], mode, m)))
    line(groups, n, k, each, columns)


def block(model: Model, weights, each: float) -> None:
    tokens = max(round(each * model.experts / max(model.top_k, 1)), 1)
    ids = [routing(model, tokens) for _ in range(ROUTINGS)]
    x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
    scores = torch.rand(tokens, ids[0].shape[1], device="cuda")
    columns = []
    for layout, a_format in BLOCKS:
        up, down = weights[layout]

        def run(i: int) -> None:
            args = (x, ids[i], scores, up, down, "silu_interleaved", a_format, torch.bfloat16)  # noqa: B023
            ops.moe(*args)

        chosen = ops.block_decodes(up, down, ids[0].numel(), a_format, x.device)
        columns.append(show(both(run), chosen))
    line(model.experts, 2 * model.inter, model.hidden, each, columns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="0.0625,0.125,0.25,0.5,1,2,3,4,6,8,12,16,32")
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "mxfp4"))
    given = parser.parse_args()
    rows, format = [float(r) for r in given.rows.split(",")], given.format
    print(f"{format}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    head = f"{'G':>5}{'N':>7}{'K':>7}{'rows':>7}"
    names = ("16 dec", "prefill", "bf16 dec", "prefill", "8 dec", "prefill")
    print(head + "".join(f"{name:>10}" for name in names))
    for model in MODELS:
        for n, k in ((2 * model.inter, model.hidden), (model.hidden, model.inter)):
            for each in rows:
                m = max(round(each * model.experts), 1)
                ids = [torch.randint(0, model.experts, (m,), device="cuda") for _ in range(ROUTINGS)]
                offs = [torch.bincount(i, minlength=model.experts).cumsum(0).int() for i in ids]
                products(model.experts, n, k, format, each, offs, m)
    for n, k in DENSE:
        for each in rows:
            if each >= 1:
                products(1, n, k, format, each, None, round(each))
    print("blocks, [N, K] of gate/up\n" + head, end="")
    names = ("none dec", "sorted", "bf16 dec", "sorted", "fp8 dec", "sorted", "auto dec", "sorted")
    print("".join(f"{name:>10}" for name in names))
    for model in MODELS:
        shapes = (2 * model.inter, model.hidden), (model.hidden, model.inter)
        weights = {
            to: [random_weight(model.experts, *shape, to, format) for shape in shapes] for to in LAYOUTS
        }
        for each in rows:
            block(model, weights, each)


if __name__ == "__main__":
    main()
