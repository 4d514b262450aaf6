"""The operators whose rows are FP4, or fp8 beside mxfp4 weights, by the CUDA kernels of csrc/sm100 and
csrc/sm120, and the check of their first use.

The results are compared with float64 and with the CPU's operators. The file runs on such a GPU, or without
one with `--emulate`. test_sm120_gpu.py and test_sm100.py test the kernels by their C interface.
"""

import ctypes
import functools
import random
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import emulated
import pytest
import reference
import torch

import fp4_ops
from fp4_ops.backends.launchers import library, scaled, scaled_sm100
from fp4_ops.backends.launchers import rows as launched_rows
from fp4_ops.backends.triton.scaled import native
from fp4_ops.runtime import first_use

BUILT = Path(fp4_ops.__file__).parent / "_sm80.so"
EMULATED = library.FILE != "_sm90.so"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not EMULATED and (not torch.cuda.is_available() or not BUILT.exists() or native.launcher(0) is None),
        reason="needs a GPU of compute capability 10.x or 12.x and _sm80.so",
    ),
]


class Family(NamedTuple):
    """Kernels for one major compute capability."""

    launcher: ModuleType
    function: str
    capability: int
    shared_bytes: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"


FAMILIES = [
    Family(scaled_sm100, "fp4_kernel_products", 100, 232448),
    Family(scaled, "fp4_kernel_scaled", 120, 101376),
]
CASES = [(family, format) for family in FAMILIES for format in family.launcher.KINDS]
"""Kernels, and the format of the rows."""
every_case = pytest.mark.parametrize(
    "family, format", CASES, ids=[f"{family.name}-{format}" for family, format in CASES]
)
SMALL = 40, 320
"""N and K in the check of the first use."""


@functools.cache
def load() -> ctypes.CDLL:
    return ctypes.CDLL(str(emulated.kernels("sm80") if EMULATED else BUILT))


@pytest.fixture
def launches(family, monkeypatch):
    """Let the launcher call these kernels. Return the arguments that it passes, and a list of functions to
    change them.
    """
    kernels, seen, changes = load(), [], []
    if EMULATED:
        kernels.emulator_device(family.capability, emulated.MULTIPROCESSORS, family.shared_bytes)
        kernels.emulator_seed(torch.initial_seed() % 2**32)
    elif native.launcher(0) is not family.launcher:
        pytest.skip(f"needs a GPU like {family.name}")

    def call(name, *args):
        if name == family.function:
            given = args[0]._obj
            for change in changes:
                change(given)
            seen.append(given)
        code = getattr(kernels, name)(*map(as_pointer, args))
        if code:
            raise RuntimeError(f"{name}: {code}")

    def as_pointer(value):
        return ctypes.c_void_p(value) if isinstance(value, int) and value > 2**31 else value

    if EMULATED:
        monkeypatch.setattr(first_use, "capturing", lambda: False)
    monkeypatch.setattr(native, "launcher", lambda _: family.launcher)
    monkeypatch.setattr(family.launcher, "call", call)
    monkeypatch.setattr(launched_rows, "call", call)
    monkeypatch.setattr(scaled, "library", lambda _: kernels)
    return seen, changes


# --- the first use ---


@every_case
def test_the_first_use_agrees(family, format, launches):
    assert native.first_error(format, repeats=2, shape=SMALL) <= 0.6 * native.BOUND


def no_order(given):
    given.sorted_rows = None


def other_format(given):
    given.nvfp4 = 1 - given.nvfp4


def other_rows(given):
    given.a_div = 1


def other_factor(given):
    given.x_factor = given.global_scale


def shifted_scales(given):
    given.scales += 1 if isinstance(given, scaled.ScaledArguments) else 16


def no_bias(given):
    given.bias = None


def other_results(given):
    given.out_type = {1: 2, 2: 1}.get(given.out_type, given.out_type)


def half_of_k(given):
    given.k = 128


def along_k(change):
    """Does so only with groups along K."""

    @functools.wraps(change)
    def changed(given):
        if given.k_ends:
            change(given)

    return changed


@along_k
def no_factor(given):
    given.x_factor = None


@along_k
def ends_at_steps(given):
    given.k = given.k // 256 * 256


@along_k
def shifted_codes(given):
    given.codes += 16


@along_k
def scales_of_half_a_word(given):
    given.scales += 4


@along_k
def one_group(given):
    given.groups = 1


BOTH = other_factor, shifted_scales, no_bias, other_results, other_format
WRONG = [(FAMILIES[0], "nvfp4", change) for change in BOTH]
ALONG_K = no_factor, ends_at_steps, shifted_codes, scales_of_half_a_word, one_group
WRONG += [(FAMILIES[0], format, change) for format in ("nvfp4", "mxfp4") for change in ALONG_K]
WRONG += [(FAMILIES[1], "nvfp4", change) for change in (*BOTH, no_order, other_rows)]
WRONG += [(FAMILIES[0], "fp8", change) for change in (*BOTH, half_of_k)]


@pytest.mark.parametrize(
    "family, format, change", WRONG, ids=[f"{f.name}-{kind}-{c.__name__}" for f, kind, c in WRONG]
)
def test_the_first_use_finds_wrong_kernels(family, format, change, launches):
    launches[1].append(change)
    assert not native.first_error(format, repeats=1, shape=SMALL) <= native.BOUND


# --- operators ---


@pytest.fixture
def operators(family, format, launches, monkeypatch):
    """The operators of such a GPU, on tensors of the CPU."""
    pytest.importorskip("triton")
    from fp4_ops.backends.triton import operators, tiles
    from fp4_ops.backends.triton.scaled import support

    def fits(w, a_format, rows=None):
        fits = family.launcher.takes(w.n, w.k, a_format) and a_format in family.launcher.KINDS
        return fits and native.weights_of(a_format) == w.fmt.name

    monkeypatch.setattr(native, "takes", fits)
    monkeypatch.setattr(native, "multiplies", fits)

    def fits_along_k(w, a_format):
        kernels = family.launcher
        return kernels.ALONG_K and a_format == w.fmt.name and w.k % kernels.PART_ALONG_K == 0

    monkeypatch.setattr(native, "takes_along_k", fits_along_k)
    monkeypatch.setattr(support, "takes", lambda *_: False)  # as with an older Triton on 12.1
    capability = divmod(family.capability, 10)
    tiles.pretend(tiles.Device(f"like {family.name}", capability, family.shared_bytes, 48))
    yield operators
    tiles.pretend(None)


@pytest.mark.skipif(not EMULATED, reason="tensors of the CPU")
@every_case
def test_operators(family, format, operators, launches):
    """Every product takes the kernels, where K and N fit, and gives what the CPU's operator gives."""
    m, g, n, k = 21, 3, 40, 256 if format == "fp8" else 192
    weights = native.weights_of(format)
    w = reference.random_weight(weights, g, n, k)
    options = {"format": weights, "out_dtype": torch.float32}
    kind = torch.float8_e4m3fn if format == "fp8" else format
    a, b = reference.random_activations(m, k, kind=kind), reference.random_activations(g, 7, k, kind=kind)
    ids = torch.randint(-1, g + 1, (m,))
    offs = torch.randint(0, m, (g,)).sort().values.int()
    one = [None if t is None else t[0] for t in w.operands()]
    calls = {
        "mm": (a, one, ()),
        "grouped_mm": (a, w.operands(), (offs,)),
        "grouped_mm_masked": (b, w.operands(), (torch.tensor([0, 9, 4]).int().clamp(max=7),)),
        "indexed_mm": (a, w.operands(), (ids,)),
    }
    if family.launcher.ALONG_K and format != "fp8":
        ends = torch.tensor([32, 32, 96, 160, k]).int()
        calls["grouped_mm_k"] = (a, one, (ends,))
    for name, (x, operands, args) in calls.items():
        a_format = "" if format == "fp8" else format
        given = {"a_scale": x.scale, "a_global_scale": x.global_scale, "a_format": a_format}
        got = getattr(operators, name)(x.data, *operands, *args, **given, **options)
        want = getattr(torch.ops.fp4, name)(x.data, *operands, *args, **given, **options)
        assert (got - want).norm() <= 2e-6 * want.norm()
    assert len(launches[0]) == len(calls)


@pytest.mark.skipif(not EMULATED, reason="tensors of the CPU")
@every_case
def test_experts(family, format, operators, launches, monkeypatch):
    """The two products of fp4::moe: rows by their experts' ids, and rows that are read by several experts."""
    from fp4_ops.backends.triton import ops
    from fp4_ops.backends.triton.scaled import ops as scaled_ops
    from fp4_ops.meta.formats import FORMATS as TABLE
    from fp4_ops.meta.gates import apply_gate

    weights = native.weights_of(format)

    def quantized(x, a_format):
        if a_format == "fp8":
            return scaled_ops.fp8_rows(*torch.ops.fp4.quantize_fp8(x.float()))
        packed, scale, factor = torch.ops.fp4.quantize(x[:, None].float(), a_format)
        factor = factor if TABLE[a_format].has_global_scale else None
        return scaled.Rows(packed[:, 0], scale[:, 0].view(torch.uint8), factor)

    def gated(y, k, activation):
        return apply_gate(y, activation)

    monkeypatch.setattr(scaled_ops, "quantized", quantized)
    monkeypatch.setattr(scaled_ops, "gated", gated)
    tokens, top_k, experts, hidden, inner = 9, 2, 4, 128 if format == "fp8" else 64, 128
    up = reference.random_weight(weights, experts, 2 * inner, hidden)
    down = reference.random_weight(weights, experts, hidden, inner)
    x = torch.randn(tokens, hidden)
    ids = torch.rand(tokens, experts).topk(top_k).indices
    args = [
        ops.WeightArgs(
            w.packed, w.scale.view(torch.uint8), w.global_scale, None, experts, n, k, TABLE[weights]
        )
        for w, n, k in ((up, 2 * inner, hidden), (down, hidden, inner))
    ]  # fmt: skip
    got = scaled_ops._experts(x, ids, *args, "silu", format).view(tokens, top_k, hidden).sum(1)
    want = torch.ops.fp4.moe(
        x, ids, torch.ones(tokens, top_k), *up.operands(), *down.operands(), format=weights, a_format=format
    )
    assert len(launches[0]) == 2
    # Sums in another order round a few hidden values to another code.
    assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.skipif(not EMULATED, reason="tensors of the CPU")
@every_case
def test_every_candidate_is_timed(family, format, operators, launches, monkeypatch):
    """`python -m fp4_ops selftest --bench`, with a clock that stands still."""
    from fp4_ops.backends.triton.scaled import times

    def quantize_rows(x, fmt):
        packed, scale, factor = torch.ops.fp4.quantize(x[:, None].float(), fmt.name)
        return packed[:, 0], scale[:, 0].view(torch.uint8), factor if fmt.has_global_scale else None

    launched = []
    shapes = [times.Shape(name, 1 if name == "mm" else 3, 40, 256, (1, 9)) for name in times.PREPARE]
    monkeypatch.setattr(times, "SHAPES", shapes)
    monkeypatch.setattr(times, "COPIED", 1 << 20)
    monkeypatch.setattr(times, "preferred_layout", lambda *_, **__: random.choice(("plain", "tile16")))
    monkeypatch.setattr(times.ops, "quantize_rows", quantize_rows)
    monkeypatch.setattr(times.ops, "quantize_fp8", torch.ops.fp4.quantize_fp8)
    lines = list(times.table(lambda launch: (launch(len(launched)), launched.append(launch), 2.0)[-1]))
    candidates, kinds = family.launcher.CANDIDATES, len(family.launcher.KINDS)
    assert "reads and writes 1049 GB/s" in lines[0]
    assert len(launches[0]) == 3 * 2 * kinds * (1 + candidates)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert len(rows) == len(launched) - 1 and {len(row) for row in rows} == {9}
    assert {row[4] for row in rows} == {"nvfp4", "mxfp4"}
    by_cuda = {row[5] for row in rows if f"{format} rows, CUDA" in row[5]}
    assert len(by_cuda) == 1 + candidates and any(", tokens 128" in name for name in by_cuda)
    assert {given.config for given in launches[0]} == set(range(-1, candidates))
