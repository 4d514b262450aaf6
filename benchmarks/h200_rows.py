"""Decode and prefill kernels by rows an expert, us: what PREFILL_ROWS in fp4_ops/sm90/ops.py is taken from.

    python benchmarks/h200_rows.py [--rows 1,2,4,8,16,32,64,128,512]

nvfp4, four models' shapes, random routing. `16` are bfloat16 rows, `8` fp8 ones. Prefill of 16-bit rows needs
them in order, which `to_half` makes (inside the operators); its time stands apart.
"""

from __future__ import annotations

import argparse

import torch
from h200_hopper import MODELS, ROUTINGS, median_us, random_weight

from fp4_ops.sm90 import decode, library, prefill, rows

MOST = 1 << 29
"""Elements of the larger of input and output."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,512")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    names = ("decode 16", "prefill 16", "to_half", "decode 8", "prefill 8")
    print(f"{'':28}{'rows':>6}" + "".join(f"{name:>12}" for name in names))
    offs_mode = decode.Routing.OFFS
    for model in MODELS:
        for n, k in ((2 * model.inter, model.hidden), (model.hidden, model.inter)):
            w = random_weight(model.experts, n, k)
            for each in map(int, given.rows.split(",")):
                m = each * model.experts
                if m * max(n, k) > MOST:
                    continue
                ids = [torch.randint(0, model.experts, (m,), device="cuda") for _ in range(ROUTINGS)]
                offs = [torch.bincount(i, minlength=model.experts).cumsum(0).int() for i in ids]
                x = torch.randn(m, k, device="cuda").bfloat16()
                half, factor = rows.to_half(x)
                codes, scale = rows.quantize_fp8(x)
                out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
                runs = [
                    lambda i: decode.run(x, w, offs[i], offs_mode, m, out),  # noqa: B023
                    lambda i: prefill.run(half, factor, w, offs[i], offs_mode, m, out),  # noqa: B023
                    lambda i: rows.to_half(x),  # noqa: B023
                    lambda i: decode.run(codes, w, offs[i], offs_mode, m, out, x_scale=scale),  # noqa: B023
                    lambda i: prefill.run(codes, scale, w, offs[i], offs_mode, m, out),  # noqa: B023
                ]
                decodes = each <= 32 and decode.choose(
                    m, model.experts, w.n, w.kp, library.multiprocessors(0)
                )
                times = [
                    f"{median_us(run):12.1f}" if decodes or "decode" not in name else f"{'':12}"
                    for name, run in zip(names, runs, strict=True)
                ]
                print(f"{model.name:14}{f'[{n}, {k}]':14}{each:>6}" + "".join(times), flush=True)


if __name__ == "__main__":
    main()
