"""Runs every Hopper kernel on a few sizes, for compute-sanitizer. pytest does not collect this file.

    compute-sanitizer --tool memcheck python tests/scripts/sanitize.py
    python tests/scripts/sanitize.py --build build/every_lane.so
    compute-sanitizer --tool racecheck python tests/scripts/sanitize.py --kernels build/every_lane.so

When a lane arrives at an mbarrier, racecheck counts only the accesses of this lane, and not those of other
lanes that __syncwarp orders before. So it reports each place where one lane arrives for its warp. --build
makes kernels in which every lane arrives (csrc/device/warp.cuh). This is a separate step, because nvcc would
not end under the sanitizer.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fp4_ops  # noqa: F401
from fp4_ops.backends.launchers import library, rows
from fp4_ops.dev import decode, prefill
from fp4_ops.meta.formats import ACTIVATIONS, FORMATS
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import native

op = torch.ops.fp4
FORM, WIDE = ({"format": "nvfp4", "layout": layout} for layout in ("sm90", "mma_bf16"))
MX_FORM, MX_WIDE = (form | {"format": "mxfp4"} for form in (FORM, WIDE))
DTYPES = (torch.bfloat16, torch.float16)


def build(library_path: Path) -> None:
    library_path.parent.mkdir(parents=True, exist_ok=True)
    csrc = Path(__file__).parents[2] / "csrc"
    sources = sorted([*csrc.glob("device/*.cu"), *csrc.glob("sm90/*.cu")])
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-lineinfo", "-Xcompiler=-fPIC"]

    def compile_one(source: Path, to: str) -> None:
        subprocess.run(["nvcc", *flags, "-DFP4_EVERY_LANE_ARRIVES", "-c", str(source), "-o", to], check=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        objects = [f"{folder}/{s.stem}.o" for s in sources]
        list(pool.map(compile_one, sources, objects))
        subprocess.run(["nvcc", *flags, "-shared", *objects, "-o", str(library_path)], check=True)


def weight(*shape: int, format: str = "nvfp4", layout: str = "sm90") -> tuple[torch.Tensor, ...]:
    return op.prepack(*op.quantize(torch.randn(shape, device="cuda"), format), format, layout)


def products() -> None:
    for groups, n, k in ((5, 64, 208), (40, 128, 512), (16, 64, 5120)):  # the last: 24 warps
        of = [
            (weight(groups, n, k, **form), form, dtype)
            for form in (FORM, MX_FORM, WIDE, MX_WIDE)
            for dtype in (DTYPES if form["layout"] == "sm90" else DTYPES[:1])
        ]
        w = of[0][0]
        for m in (1, 37, 300):
            ids = torch.randint(-1, groups, (m,), device="cuda")
            counts = torch.bincount(torch.where(ids < 0, groups, ids), minlength=groups + 1)
            offs = counts[:groups].cumsum(0).int()
            for operands, form, dtype in of:
                x = torch.randn(m, k, device="cuda").to(dtype)
                op.grouped_mm(x, *operands, offs, **form)
                op.indexed_mm(x, *operands, ids, **form)
            a, scale = op.quantize_fp8(x, layout="sm90")
            op.grouped_mm(a, *w, offs, scale, **FORM)
            masked = x.view(1, m, k).expand(groups, -1, -1).contiguous()
            op.grouped_mm_masked(masked, *w, offs.clamp(max=m), **FORM)
            for format in ("int4", "int4_g64", "int4_g32"):
                int4 = {"format": format, "layout": "sm90_int4"}
                op.grouped_mm(a, *weight(groups, n, k, **int4), offs, scale, **int4)


def blocks() -> None:
    experts, hidden, inter, top_k = 8, 256, 128, 2
    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    up, down = (weight(*shape) for shape in shapes)
    wide = [t for shape in shapes for t in weight(*shape, **WIDE)]
    for tokens in (1, 50, 400):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        ids = torch.randint(-1, experts, (tokens, top_k), device="cuda")
        scores = torch.rand(tokens, top_k, device="cuda")
        for activation in ("silu", "silu_interleaved"):
            for a_format in ("none", "fp8", "nvfp4", "mxfp4"):
                op.moe(x, ids, scores, *up, *down, activation=activation, a_format=a_format, **FORM)
            op.moe(x, ids, scores, *wide, activation=activation, a_format="none", **WIDE)


def candidates() -> None:
    """Runs every candidate of prefill, also those that are chosen only for larger sizes. Then runs them with
    so many steps of K that blocks share tiles."""
    for groups, n, k in ((3, 384, 640), (3, 128, 7168)):
        candidates_of(groups, n, k)


def candidates_of(groups: int, n: int, k: int) -> None:
    offs = torch.tensor([0, 230, 300], dtype=torch.int32, device="cuda")
    x = torch.randn(int(offs[-1]), k, device="cuda").bfloat16()
    out = torch.empty(len(x), n, dtype=torch.bfloat16, device="cuda")
    gate = ACTIVATIONS["silu_interleaved"]
    kernels = {"half": rows.to_half(x), "bf16": (x, None), "w4a8": rows.quantize_fp8(x)}
    for (kernel, ordered), format in itertools.product(kernels.items(), ("nvfp4", "mxfp4")):
        layout = "mma_bf16" if kernel == "bf16" else "sm90"
        packed, block = weight(groups, n, k, format=format, layout=layout), FORMATS[format].block
        w = decode.NativeWeight(*packed, None, groups, n, k, LAYOUTS[layout], block)
        for config in range(len(prefill.candidates(kernel))):
            routed = (w, offs, decode.Routing.OFFS, len(x))
            prefill.run(*ordered, *routed, out, config=config)
            prefill.run(*ordered, *routed, out[:, : n // 2].contiguous(), gate=gate, config=config)


def claimed() -> None:
    """Runs tiles that multiprocessors claim. There must be many tiles, so the weights are random bytes."""
    sms = library.multiprocessors(0)
    groups, n, k, m = 4, 128 * sms, 2048, 60
    codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(40, 120, (groups, n, k // 16), dtype=torch.uint8, device="cuda")
    factor = torch.ones(groups, device="cuda")
    x = torch.randn(m, k, device="cuda").bfloat16()
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    offs = torch.tensor([20, 20, 59, 60], dtype=torch.int32, device="cuda")
    for kernel, layout, ordered in (("bf16", "mma_bf16", (x, None)), ("w4a8", "sm90", rows.quantize_fp8(x))):
        w = decode.NativeWeight(codes, scale, factor, None, groups, n, k, LAYOUTS[layout], 16)
        size = decode.Routing.OFFS, groups, m, n, k, sms, kernel
        configs = [i for i in range(len(prefill.candidates(kernel))) if prefill.choose(*size, i).claims]
        assert configs, kernel
        for config in configs:
            prefill.run(*ordered, w, offs, decode.Routing.OFFS, m, out, config=config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="compile such kernels, and run nothing")
    parser.add_argument("--kernels", type=Path, help="run these, not the package's")
    args = parser.parse_args()
    if args.build:
        return build(args.build)
    if args.kernels:
        library.FILE = str(args.kernels.absolute())  # replaces the path in the package's folder
        library.library.cache_clear()
    for kernel in ("decode", "gemv", "prefill"):
        with native.only(kernel):
            products()
            blocks()
    candidates()
    claimed()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
