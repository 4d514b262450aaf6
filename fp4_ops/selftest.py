"""`python -m fp4_ops selftest`: every operator of this machine's kernels against float64, with times.

Weights and activations are dequantised exactly, by the tables of meta/, and multiplied in float64. An error
is the norm of the difference over the norm of what it should be; the bounds are those of docs/operators.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native
from .cuda import multiplies_fp4
from .gates import apply_gate
from .info import info
from .meta.formats import A_FORMATS, ACTIVATIONS, ELEMENTS, FORMATS, FP4_FORMATS, INT8_BLOCK
from .meta.layouts import LAYOUTS, preferred_layout

F64 = torch.float64
G, N, K, M = 5, 192, 128, 37
"""Experts, columns, inner size and rows. The fourth expert gets no row."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = ("int8", "fp8", *FP4_FORMATS)
BOUNDS = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3, **dict.fromkeys(QUANTISED, 4e-3)}
"""By kind of activations; what is quantised has bfloat16 results."""
MOE_BOUNDS = {"none": 4e-3, "int8": 6e-3, "fp8": 8e-3, "nvfp4": 3e-2, "mxfp4": 3e-2, "auto": 4e-2}
"""By `a_format`: a value on the edge between two codes may get either."""
FOLDED = 4e-2
"""Hopper's kernels of fp8 rows round each weight times its scale to e4m3, int4's by 2.7e-2 of its size."""
FOLDED_INT4_MOE = 8e-2
"""Gate and up are two such products, whose errors meet, down is a third: 4.7e-2. With activations that the
reference does not round, 6.6e-2."""
PRODUCTS = ("mm", "grouped_mm", "grouped_mm_masked", "indexed_mm", "grouped_mm_k")


class Weight(NamedTuple):
    packed: Tensor
    scale: Tensor
    global_scale: Tensor | None
    exact: Tensor
    """float64."""


@dataclass(frozen=True)
class Case:
    operator: str
    format: str
    layout: str
    kind: str
    """Of activations: a dtype, or how they are quantised; of `moe`, its `a_format`."""
    activation: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operator, self.format, self.layout, self.kind, self.activation)))


@dataclass
class Result:
    device: str
    checked: int = 0
    failed: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """By operator: the largest error over its bound."""
    us: dict[str, float] = field(default_factory=dict)


# --- float64 ---


def dequantize(packed: Tensor, scale: Tensor, global_scale: Tensor | None, format: str) -> Tensor:
    """code x block scale x global scale, exactly."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = torch.tensor(ELEMENTS[FORMATS[format].element], dtype=F64, device=packed.device)[codes.long()]
    # e8m0 has no conversion to float64 on every device.
    steps = scale.float().to(F64).repeat_interleave(FORMATS[format].block, -1)[..., : values.shape[-1]]
    values = values * steps
    if global_scale is None or global_scale.numel() == 0:
        return values
    factor = global_scale.to(F64)
    return values * factor.reshape(*factor.shape, *(1,) * (values.dim() - factor.dim()))


def quantised(x: Tensor, kind: str, layout: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of an operator for activations of a kind, and their exact values."""
    fp4 = torch.ops.fp4
    if kind in DTYPES:
        a = x.to(DTYPES[kind])
        return {"a": a}, a.to(F64)
    if kind == "int8":
        codes, scale = fp4.quantize_int8(x)
        return {"a": codes, "a_scale": scale}, codes.to(F64) * scale.to(F64).repeat_interleave(INT8_BLOCK, -1)
    if kind == "fp8":
        plain, scale = fp4.quantize_fp8(x)
        codes, _ = fp4.quantize_fp8(x, layout=LAYOUTS[layout].a_layout)
        return {"a": codes, "a_scale": scale}, plain.to(F64) * scale.to(F64)[..., None]
    packed, scale, global_scale = fp4.quantize(x, kind)
    given = global_scale if FORMATS[kind].has_global_scale else None
    return (
        {"a": packed, "a_scale": scale, "a_global_scale": given, "a_format": kind},
        dequantize(packed, scale, given, kind),
    )


def random_weight(shape: tuple[int, ...], format: str, layout: str, device: str) -> Weight:
    """As `fp4::quantize` makes it, then prepacked."""
    w = torch.randn(shape, device=device) / shape[-1] ** 0.5
    packed, scale, global_scale = torch.ops.fp4.quantize(w, format)
    given = global_scale if FORMATS[format].has_global_scale else None
    exact = dequantize(packed, scale, given, format)
    if layout != "plain":
        packed, scale, global_scale = torch.ops.fp4.prepack(packed, scale, given, format, layout)
        given = global_scale if global_scale.numel() or LAYOUTS[layout].has_factor else None
    return Weight(packed, scale, given, exact)


# --- the cases ---


def layouts(device: str) -> list[str]:
    """Those that this device's kernels read."""
    family = native.family(torch.cuda.current_device()) if device == "cuda" else 0
    read = {native.HOPPER: [n for n in LAYOUTS if LAYOUTS[n].native], native.MMA: ["mma_bf16"]}.get(
        family, []
    )
    return ["plain", *(["tile16"] if device == "cpu" else read)]


def kinds(layout: str, device: str) -> list[str]:
    read = LAYOUTS[layout].a_dtypes
    dtypes = {**DTYPES, "fp8": torch.float8_e4m3fn, **dict.fromkeys(FP4_FORMATS, torch.uint8)}
    if device == "cpu":
        dtypes["int8"] = torch.int8
    return [name for name, dtype in dtypes.items() if not read or dtype in read]


def cases(device: str) -> Iterator[Case]:
    """All on a CPU and for Hopper's kernels. Triton compiles for each, so there each takes the next kind."""
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
    for format in FP4_FORMATS:
        if device == "cuda" and multiplies_fp4(format, format):  # by kernels of their own
            yield from (Case(operator, format, "plain", format) for operator in PRODUCTS)
            yield Case("moe", format, "plain", format, "silu")


def product(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """What the operator gives, and what it should."""
    groups = () if case.operator in ("mm", "grouped_mm_k") else (G,)
    w = random_weight((*groups, N, K), case.format, case.layout, device)
    rows = (G, M, K) if case.operator == "grouped_mm_masked" else (M, K)
    given, x = quantised(torch.randn(rows, device=device), case.kind, case.layout)
    a = given.pop("a")
    ends = torch.tensor([9, 10, 26, 26, M - 2], dtype=torch.int32, device=device)
    ids = torch.searchsorted(ends, torch.arange(M, dtype=torch.int32, device=device), right=True)
    valid = ids < G
    options = {"format": case.format, "layout": case.layout, **given}
    call = getattr(torch.ops.fp4, case.operator)
    operands = a, w.packed, w.scale, w.global_scale
    if case.operator == "mm":
        return call(*operands, **options), x @ w.exact.T
    if case.operator == "grouped_mm_k":
        block = max(FORMATS[case.format].block, 32)
        ends = torch.tensor([block, block, K], dtype=torch.int32, device=device)
        parts = [slice(0, block), slice(block, block), slice(block, K)]
        return call(*operands, ends, **options), torch.stack([x[:, p] @ w.exact[:, p].T for p in parts])
    if case.operator == "grouped_mm_masked":
        count = torch.tensor([9, 1, 16, 0, M], dtype=torch.int32, device=device)
        there = torch.arange(M, device=device) < count[:, None]
        return call(*operands, count, **options), (x @ w.exact.mT) * there[..., None]
    want = torch.einsum("mk,mnk->mn", x, w.exact[ids.clamp(max=G - 1)]) * valid[:, None]
    if case.operator == "indexed_mm":
        return call(*operands, torch.where(valid, ids, -1), **options), want
    return call(*operands, ends, **options), want


def block(case: Case, device: str) -> tuple[Tensor, Tensor]:
    act = ACTIVATIONS[case.activation]
    inner, top_k = N, 3
    w13 = random_weight((G, act.parts * inner, K), case.format, case.layout, device)
    w2 = random_weight((G, K, inner), case.format, case.layout, device)
    x = torch.randn(M, K, device=device, dtype=torch.bfloat16)
    ids = torch.rand(M, G - 1, device=device).topk(top_k).indices  # the last expert gets no row
    weights = torch.rand(M, top_k, device=device)
    got = torch.ops.fp4.moe(
        x, ids, weights, *w13[:3], *w2[:3], format=case.format, layout=case.layout,
        activation=case.activation, a_format=case.kind, out_dtype=torch.float32,
    )  # fmt: skip

    def as_read(rows: Tensor) -> Tensor:
        """In FP4 every row has a global scale of its own, as a matrix has."""
        if case.kind not in QUANTISED:
            return rows.to(F64)
        return quantised(rows.float()[:, None], case.kind, "plain")[1][:, 0]

    want = torch.zeros(M, K, dtype=F64, device=device)
    first = as_read(x)
    for j in range(top_k):
        h = apply_gate(torch.einsum("mk,mnk->mn", first, w13.exact[ids[:, j]]), act)
        y = torch.einsum("mk,mnk->mn", as_read(h), w2.exact[ids[:, j]])
        want += weights[:, j, None].to(F64) * y
    return got, want


def bound(case: Case) -> float:
    least = (MOE_BOUNDS if case.operator == "moe" else BOUNDS)[case.kind]
    folds = LAYOUTS[case.layout].native and case.kind in ("fp8", "auto")
    if not folds:
        return least
    int4 = case.operator == "moe" and FORMATS[case.format].element == "int4"
    return max(least, FOLDED_INT4_MOE if int4 else FOLDED)


def conversions(device: str) -> Iterator[tuple[str, float, float]]:
    """(what, error, bound) of what makes and reads weights."""
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


def relative_error(got: Tensor, want: Tensor) -> float:
    """NaN counts as infinite."""
    error = ((got.to(F64) - want).norm() / want.norm()).item()
    return error if error == error else float("inf")


# --- times ---

SHAPE = 8, 2048, 768
"""Experts, hidden and inner size of the block that is timed, top 2."""


def times(device: str) -> dict[str, float]:
    """Microseconds a call of `moe` in the preferred layout, nvfp4 and bfloat16 rows: the median of some."""
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


# --- the run ---


def run(device: str, show: Callable[[str], None] = print) -> Result:
    """Checks every case on one device and shows a line for each that fails."""
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
        for case in cases(device):
            try:
                error = relative_error(*(block if case.operator == "moe" else product)(case, device))
            except RuntimeError as raised:
                show(f"RAISED  {device}  {case}: {str(raised).splitlines()[0]}")
                error = float("inf")
            note(case.operator, str(case), error, bound(case))
        result.us = times(device)
    return result


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    begin = time.perf_counter()
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
    if failed:
        sys.exit(1)


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "selftest", help="compare every operator of this machine's kernels with float64, and time some"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random data (default: 0)")
    command.set_defaults(run=main)
