"""`python -m fp4_ops selftest`: compares every operator on this machine with float64, and times a few.

oracle.py computes the exact results. docs/operators.md describes the bounds (Accuracy).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from .backends import available, multiplies_fp4, reader
from .info import info
from .meta.arguments import whole_number
from .meta.formats import A_FORMATS, ACTIVATIONS, FORMATS, FP4_FORMATS
from .meta.layouts import LAYOUTS, preferred_layout
from .meta.text import in_short
from .runtime.oracle import (
    DTYPES,
    F64,
    PRODUCTS,
    QUANTISED,
    Case,
    K,
    M,
    N,
    block,
    dequantize,
    folds,
    product,
    quantised,
    random_weight,
    relative_error,
)

BOUNDS = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3, **dict.fromkeys(QUANTISED, 4e-3)}
"""Bound by kind of activations. Quantised activations give bfloat16 results."""
MOE_BOUNDS = {"none": 4e-3, "int8": 6e-3, "fp8": 8e-3, "nvfp4": 3e-2, "mxfp4": 3e-2, "auto": 4e-2}
"""Bound by `a_format`. A value half-way between two codes may get either code."""
FOLDED = 4e-2
"""Bound of Hopper's kernels for fp8 rows.

In `moe`, results of the first product are rounded to bfloat16 before they become fp8. This adds an error of
up to 2.1e-2. For single products, some layouts round weights to e4m3 only if there are many rows. The
reference does not round these weights, and the difference is 2.2e-2 for nvfp4. If a layout always rounds them
(`folds`), the reference rounds them, too.
"""


@dataclass
class Result:
    device: str
    checked: int = 0
    failed: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """Largest error over its bound, by operator."""
    us: dict[str, float] = field(default_factory=dict)


# --- the cases ---


def layouts(device: str) -> list[str]:
    """Lists the layouts that this device's kernels read."""
    here = available(device, torch.cuda.current_device() if device == "cuda" else 0)
    read = {layout for backend in here for layout in backend.layouts}
    return [layout for layout in LAYOUTS if layout in read]


def kinds(layout: str, device: str) -> list[str]:
    read = LAYOUTS[layout].a_dtypes
    if LAYOUTS[layout].native and (here := reader(layout, device, torch.cuda.current_device())):
        read = here.reads(layout)
    dtypes = {**DTYPES, "fp8": torch.float8_e4m3fn, **dict.fromkeys(FP4_FORMATS, torch.uint8)}
    if device == "cpu":
        dtypes["int8"] = torch.int8
    return [name for name, dtype in dtypes.items() if not read or dtype in read]


def cases(device: str) -> Iterator[Case]:
    """Yields the cases: all for a CPU and for Hopper's kernels, and one kind of activations each for Triton.

    Triton compiles a kernel for every case, which takes long.
    """
    turn = 0
    for layout in layouts(device):
        some = device == "cuda" and not LAYOUTS[layout].native
        for format in LAYOUTS[layout].formats:
            for operator in PRODUCTS:
                found = kinds(layout, device)
                for kind in [found[turn % len(found)]] if some else found:
                    yield Case(operator, format, layout, kind)
                turn += 1
            allowed = [a for a in LAYOUTS[layout].a_formats or A_FORMATS if a != "int8" or device == "cpu"]
            activations = [a for a in ACTIVATIONS if ACTIVATIONS[a].gated or not LAYOUTS[layout].native]
            for i, activation in enumerate(activations):
                for kind in [allowed[(turn + i) % len(allowed)]] if some or i else allowed:
                    yield Case("moe", format, layout, kind, activation)
    if device == "cuda" and "plain" in layouts(device):  # this pair has kernels of its own on some GPUs
        yield from (Case(operator, "mxfp4", "plain", "fp8") for operator in PRODUCTS)
        yield Case("moe", "mxfp4", "plain", "fp8", "silu")
    for format in FP4_FORMATS:
        if device == "cuda" and multiplies_fp4(format, format):  # these pairs have their own kernels
            yield from (Case(operator, format, "plain", format) for operator in PRODUCTS)
            yield Case("moe", format, "plain", format, "silu")


def bound(case: Case) -> float:
    least = (MOE_BOUNDS if case.operator == "moe" else BOUNDS)[case.kind]
    if not LAYOUTS[case.layout].native or case.kind not in ("fp8", "auto"):
        return least
    exact = case.operator != "moe" and folds(case.layout, case.kind)
    return least if exact else max(least, FOLDED)


def conversions(device: str) -> Iterator[tuple[str, float, float]]:
    """Yields (name, error, bound) of each operator that makes or reads weights."""
    fp4 = torch.ops.fp4
    for format, fmt in FORMATS.items():
        x = torch.randn(3, N, K, device=device)
        packed, scale, global_scale = fp4.quantize(x, format)
        given = global_scale if fmt.has_global_scale else None
        exact = dequantize(packed, scale, given, format)
        yield f"quantize {format}", relative_error(exact, x.to(F64)), 0.2
        again = fp4.dequantize(packed, scale, given, format, F64)
        yield f"dequantize {format}", relative_error(again, exact), 1e-15
        for layout in layouts(device):
            if format not in LAYOUTS[layout].formats:
                continue
            there = fp4.prepack(packed, scale, given, format, layout)
            factor = there[2] if there[2].numel() or LAYOUTS[layout].has_factor else None
            back = fp4.unpack(there[0], there[1], factor, format, layout)
            same = dequantize(back[0], back[1], back[2] if back[2].numel() else None, format)
            yield f"prepack {format} {layout}", relative_error(same, exact), 1e-15
    x = torch.randn(M, K, device=device)
    for kind in ("int8", "fp8") if device == "cpu" else ("fp8",):
        yield f"quantize_{kind}", relative_error(quantised(x, kind, "plain")[1], x.to(F64)), 4e-2


# --- times ---

SHAPE = 8, 2048, 768
"""Experts, hidden size and inner size of the block that is timed. top_k is 2."""


def times(device: str) -> dict[str, float]:
    """Measures `moe` in the preferred layout with nvfp4 weights and bfloat16 rows: median microseconds."""
    experts, hidden, inner = SHAPE
    shapes = (2 * inner, hidden), (hidden, inner)
    layout = preferred_layout(device, *shapes, dtype=torch.bfloat16, format="nvfp4", a_format="auto")
    w13 = random_weight((experts, 2 * inner, hidden), "nvfp4", layout, device)[:3]
    w2 = random_weight((experts, hidden, inner), "nvfp4", layout, device)[:3]
    a_format = "auto" if "auto" in (LAYOUTS[layout].a_formats or A_FORMATS) else "none"
    found = {}
    for tokens in (1, 64):
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device=device).topk(2).indices
        weights = torch.rand(tokens, 2, device=device)

        def call() -> None:
            torch.ops.fp4.moe(
                x, ids, weights, *w13, *w2,  # noqa: B023
                format="nvfp4", layout=layout, a_format=a_format,
            )  # fmt: skip
            if device == "cuda":
                torch.cuda.synchronize()

        found[f"{tokens} token{'s' * (tokens > 1)}"] = median_us(call)
    return found


def median_us(call: Callable[[], None], rounds: int = 15) -> float:
    for _ in range(3):
        call()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken)


def bench() -> Iterator[str]:
    """Yields a table of the products with FP4 weights on this GPU, in Markdown."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    if device is None or not any(backend.name == "triton" for backend in available("cuda", device)):
        yield "\n--bench times kernels on a GPU, and needs Triton. There is nothing to time here."
        return
    from .backends.triton.scaled import times as fp4_rows

    here = info()
    yield f"\n{here.gpus[device]}; fp4_ops {here.fp4_ops}, torch {here.torch}, triton {here.triton}"
    with torch.no_grad():
        yield from fp4_rows.table()


# --- the run ---


def run(device: str, show: Callable[[str], None] = tqdm.write) -> Result:
    """Checks every case on one device. Shows a line for each failure, and a bar if it runs in a terminal."""
    result = Result(device)

    def note(operator: str, what: str, error: float, most: float) -> None:
        result.checked += 1
        result.worst[operator] = max(result.worst.get(operator, 0.0), error / most)
        if not error <= most:
            result.failed.append(what)
            show(f"FAILED  {device}  {what}: error {error:.2e}, at most {most:.0e}")

    with torch.no_grad():
        for what, error, most in conversions(device):
            note(what.split()[0], what, error, most)
        for case in tqdm(list(cases(device)), device, leave=False, disable=None):
            try:
                error = relative_error(*(block if case.operator == "moe" else product)(case, device))
            except RuntimeError as raised:
                show(f"RAISED  {device}  {case}: {in_short(raised)}")
                error = float("inf")
            note(case.operator, str(case), error, bound(case))
        result.us = times(device)
    return result


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    begin = time.perf_counter()
    print(f"This command checks {' and '.join(devices)}. It takes about a minute", flush=True)
    results = [run(device) for device in devices]
    for r in results:
        print(f"\n{r.device:<20}{'largest error over its bound':>30}")
        for operator, share in r.worst.items():
            print(f"  {operator:<18}{share:>30.3f}")
        experts, hidden, inner = SHAPE
        for what, us in r.us.items():
            print(f"  moe, nvfp4, {experts} experts {hidden} x {inner}, top 2, {what}: {us:.0f} us")
    here = info()
    kernels = "; ".join(f"{k.device} {k.family}" for k in here.kernels)
    gpus = ", ".join(g.name for g in here.gpus) or "no GPU"
    failed = sum(len(r.failed) for r in results)
    print(
        f"\nfp4_ops {here.fp4_ops} selftest: {sum(r.checked for r in results)} checks, {failed} failed, "
        f"seed {args.seed}, {time.perf_counter() - begin:.0f} s; torch {here.torch}, Python {here.python}, "
        f"triton {here.triton}; {platform.machine()}, {gpus}; kernels: {kernels}"
    )
    if args.bench:
        for line in bench():
            print(line)
    if failed:
        sys.exit(1)


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "selftest", help="compare every operator on this machine with float64, and time a few"
    )
    command.add_argument(
        "--seed", type=whole_number(0, 2**64 - 1), default=0, help="seed of the random data (default: 0)"
    )
    command.add_argument(
        "--bench",
        action="store_true",
        help="also print a table of times of this GPU's kernels, to paste into an issue",
    )
    command.set_defaults(run=main)
