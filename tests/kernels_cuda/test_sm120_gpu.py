"""FP4 rows by FP4 weights with the block-scaled mma.sync of compute capability 12.x (csrc/sm120).

The results of the C interface are compared with float64, bit for bit if sums are exact, and with the CPU's
operators. The file runs on such a GPU, or without one with `--emulate`.
"""

import ctypes
import functools
import random
from pathlib import Path

import emulated
import pytest
import reference
import torch
from conftest import large

import fp4_ops
from fp4_ops.backends.launchers import library, scaled
from fp4_ops.backends.launchers.scaled import CONTIGUOUS, DENSE, MASKED

BUILT = Path(fp4_ops.__file__).parent / "_sm80.so"
EMULATED = library.FILE != "_sm90.so"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not EMULATED and (not torch.cuda.is_available() or not BUILT.exists() or not scaled.built(0)),
        reason="needs a GPU of compute capability 12.x and _sm80.so",
    ),
]

FORMATS = ("nvfp4", "mxfp4")
CANDIDATES = range(4)
TOKENS = (128, 64, 32, 16)
"""Most tokens of a tile, for each candidate."""
ROUTES = ("dense", "contiguous", "masked", "sorted")
SHAPES = [(40, 64), (136, 320), (128, 256), (264, 576)]
"""N and K: less than a tile, tiles and a bit, with K that ends in every part of a step."""


@functools.cache
def load() -> ctypes.CDLL:
    if not EMULATED:
        return ctypes.CDLL(str(BUILT))
    return ctypes.CDLL(str(emulated.kernels("sm80")))


@pytest.fixture
def kernels():
    loaded = load()
    if EMULATED:
        loaded.emulator_device(120, emulated.MULTIPROCESSORS, 101376)
        loaded.emulator_seed(torch.initial_seed() % 2**32)
    return loaded


def random_scales(format: str, shape: tuple[int, ...], exact: bool) -> torch.Tensor:
    """Block scales; if `exact`, so few powers of two that float32 holds every sum of products."""
    if format == "nvfp4":
        byte = torch.randint(0, 3, shape) * 8 + 0x30 if exact else torch.randint(0, 0x50, shape)
    else:
        byte = torch.randint(126, 129, shape) if exact else torch.randint(112, 132, shape)
    return byte.to(torch.uint8)


class Operand:
    """[.., rows, k] of codes and scales, and its values in float64."""

    def __init__(self, format: str, lead: tuple[int, ...], k: int, factors: tuple[int, ...], exact: bool):
        self.packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8)
        self.scale = random_scales(format, (*lead, k // reference.BLOCK[format]), exact)
        self.factor = None
        self.values = reference.unpack_codes(self.packed)
        self.values = reference.E2M1[self.values.long()]
        typed = self.scale.view(reference.SCALE_DTYPE[format])
        self.values = self.values * reference.scale_values(typed).repeat_interleave(
            reference.BLOCK[format], -1
        )
        if format == "nvfp4":
            self.factor = 2.0 ** torch.randint(-9, 3, factors) if exact else torch.rand(factors) + 0.1
            missing = self.values.dim() - len(factors)
            self.values = self.values * self.factor.double().view(*factors, *[1] * missing)


class Case:
    """A product: operands, route, and what it is in float64."""

    def __init__(self, format, route, counts, n, k, *, exact=True, out=torch.float32, bias=None, a_div=1):
        groups, self.format, self.exact, self.out_dtype, self.a_div = len(counts), format, exact, out, a_div
        self.w = Operand(format, (groups, n), k, (groups,), exact)
        self.bias = None if bias is None else torch.randint(-8, 9, (groups, n)).to(bias)
        sorted_rows = group_rows = None
        if route == "masked":
            mode, self.m = MASKED, max(*counts, 1) + random.randint(0, 3)
            group_rows = torch.tensor(counts)
            self.rows = groups * self.m
            self.ids = reference.masked_indices(group_rows, self.m).reshape(-1)
        elif route == "dense":
            mode, self.m, self.ids = DENSE, counts[0], torch.zeros(counts[0], dtype=torch.long)
        else:
            mode, unused = CONTIGUOUS, random.choice((0, 0, 5))
            self.m = sum(counts) + unused
            self.m += -self.m % a_div
            group_rows = torch.tensor(counts).cumsum(0)
            self.ids = reference.m_indices(group_rows, self.m)
            if route == "sorted":
                sorted_rows = torch.randperm(self.m)
                self.ids = self.ids[sorted_rows.argsort()]
        if route != "masked":
            self.rows = self.m
        places = [None if t is None else t.int().cuda() for t in (group_rows, sorted_rows)]
        self.route = scaled.Route(mode, *places)
        self.x = Operand(format, (self.rows // a_div,), k, (self.rows // a_div,), exact)

    def run(self, kernels, config: int = -1) -> torch.Tensor:
        n = self.w.packed.shape[1]
        out = torch.full((self.rows, n), torch.nan, dtype=self.out_dtype, device="cuda")
        on = [None if t is None else t.cuda() for t in (self.x.packed, self.x.scale, self.x.factor)]
        w = [self.w.packed, self.w.scale, self.w.factor, self.bias]
        weights = scaled.Weights(*(None if t is None else t.cuda() for t in w), self.format)
        given, _kept = scaled.arguments(
            scaled.Rows(*on), weights, out, self.m, self.route, self.a_div, config
        )
        assert kernels.fp4_kernel_scaled(ctypes.byref(given)) == 0
        torch.cuda.synchronize()
        return out.cpu()

    def expected(self) -> torch.Tensor:
        """float64, with zeros in rows of no group."""
        x = self.x.values.repeat_interleave(self.a_div, 0)
        bias = torch.zeros(self.w.packed.shape[:2]) if self.bias is None else self.bias
        found = torch.zeros(self.rows, self.w.packed.shape[1], dtype=torch.float64)
        for e, its in enumerate(self.w.values):
            here = self.ids == e
            found[here] = x[here] @ its.T + bias[e].double()
        return found

    def check(self, kernels, config: int = -1) -> None:
        got, want = self.run(kernels, config), self.expected()
        if self.exact:
            assert torch.equal(got, want.to(self.out_dtype)), (got.double() - want).abs().max()
        else:
            assert (got.double() - want).norm() <= 2e-6 * want.norm()
            assert not got[self.ids < 0].any()


def random_counts(tokens: int, route: str) -> list[int]:
    """Rows of each group: none, few, those of a tile of so many tokens, and more."""
    if route == "dense":
        return [random.choice((1, tokens, tokens + 3))]
    return random.sample([0, random.randint(1, 9), tokens, tokens + random.randint(1, 9)], 4)


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("format", FORMATS)
def test_products(format, route, config, n, k, kernels):
    """Every candidate, route and format: 128 points, bit for bit."""
    tokens = TOKENS[config]
    a_div = random.choice((1, 4)) if route == "sorted" else 1
    bias = random.choice((None, torch.float32, torch.bfloat16))
    Case(format, route, random_counts(tokens, route), n, k, bias=bias, a_div=a_div).check(kernels, config)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_any_scales(format, out, kernels):
    """Scales of all sizes, also zero, and factors that are no powers of two."""
    case = Case(format, "sorted", [3, 0, 21], 72, 448, exact=False, out=torch.float32)
    case.check(kernels)
    want = case.run(kernels).to(out)
    case.out_dtype = out
    assert torch.equal(case.run(kernels), want)


SIZES = {
    "K 2880": ("sorted", [5, 0, 17, 2], 48, 2880),
    "N 32768": ("contiguous", [3, 0, 2], 32768, 64),
    "256 groups": ("contiguous", [int(e % 9 == 0) for e in range(256)], 16, 128),
    "empty": ("contiguous", [0, 0, 0], 128, 128),
    "one row": ("dense", [1], 128, 2048),
    "partial masks": ("masked", [1, 0, 40, 13], 136, 192),
    "many rows": ("contiguous", [300, 0, 170], 264, 320),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_sizes(format, size, kernels):
    """With the candidate that the sizes suggest."""
    Case(format, *SIZES[size]).check(kernels)


@large
@pytest.mark.parametrize("format", FORMATS)
def test_large(format, kernels):
    Case(format, "sorted", torch.randint(0, 900, (64,)).tolist(), 4096, 7168).check(kernels)


@pytest.mark.parametrize("format", FORMATS)
def test_the_operators_of_the_cpu_give_the_same_bits(format, kernels):
    """W4A4 is one definition: codes, block scales and factors of both operands."""
    case = Case(format, "contiguous", [7, 0, 20, 1], 40, 320)
    got = case.run(kernels)
    w = case.w.packed, case.w.scale.view(reference.SCALE_DTYPE[format]), case.w.factor
    there = torch.ops.fp4.grouped_mm(
        case.x.packed, *w, case.route.group_rows.cpu(),
        case.x.scale.view(reference.SCALE_DTYPE[format]), None, case.x.factor,
        format=format, a_format=format, out_dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(got, there)


@pytest.mark.parametrize("config", CANDIDATES)
def test_a_row_with_a_negative_scale_is_nan(config, kernels):
    """Tensor cores would read it without its sign. The other rows stay as they are."""
    case = Case("nvfp4", "contiguous", [9, 20], 56, 320)
    want = case.expected().float()
    row, weight = random.randrange(29), random.randrange(56)
    case.x.scale[row, random.randrange(20)] |= 128
    case.w.scale[1, weight, random.randrange(20)] |= 128
    want[row] = torch.nan
    want[9:29, weight] = torch.nan
    assert torch.equal(case.run(kernels, config).nan_to_num(1e9), want.nan_to_num(1e9))


@pytest.mark.parametrize("format", FORMATS)
def test_nan_scales_stay_in_their_rows(format, kernels):
    case = Case(format, "masked", [9, 20], 56, 192)
    want = case.expected().float().view(2, -1, 56)
    case.x.scale[3, 2] = 127 if format == "nvfp4" else 255
    case.w.scale[1, 5, 4] = 127 if format == "nvfp4" else 255
    want[0, 3] = torch.nan
    want[1, :20, 5] = torch.nan
    assert torch.equal(case.run(kernels).view_as(want).nan_to_num(1e9), want.nan_to_num(1e9))


def test_what_it_refuses(kernels):
    """K that ends inside an instruction, N inside 16 bytes of results, another GPU."""
    for n, k in ((40, 96), (36, 64)):
        assert not scaled.takes(n, k)
        with pytest.raises(AssertionError):
            Case("nvfp4", "dense", [3], n, k).run(kernels)
    if EMULATED:
        for capability in (89, 90, 100):
            kernels.emulator_device(capability, emulated.MULTIPROCESSORS, 101376)
            with pytest.raises(AssertionError):
                Case("nvfp4", "dense", [3], 40, 64).run(kernels)
