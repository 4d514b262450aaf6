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
from fp4_ops.backends.launchers import rows as launched_rows
from fp4_ops.backends.launchers.scaled import CONTIGUOUS, DENSE, MASKED
from fp4_ops.backends.triton.scaled import native

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


# --- the first use, and the operators ---


@pytest.fixture
def launches(kernels, monkeypatch):
    """Let the launcher call these kernels. Return the arguments that it passes, and a list of functions to
    change them.
    """
    seen, changes = [], []

    def call(name, *args):
        if name == "fp4_kernel_scaled":
            given = args[0]._obj
            for change in changes:
                change(given)
            seen.append(given)
        code = getattr(kernels, name)(*map(as_pointer, args))
        if code:
            raise RuntimeError(f"{name}: {code}")

    def as_pointer(value):
        return ctypes.c_void_p(value) if isinstance(value, int) and value > 2**31 else value

    monkeypatch.setattr(scaled, "call", call)
    monkeypatch.setattr(launched_rows, "call", call)
    return seen, changes


SMALL = 40, 320
"""N and K in the check of the first use."""


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_use_agrees(format, launches):
    assert native.first_error(format, repeats=2, shape=SMALL) <= 0.6 * native.BOUND


def no_order(given):
    given.sorted_rows = None


def other_format(given):
    given.nvfp4 = 1 - given.nvfp4


def other_factor(given):
    given.x_factor = given.global_scale


def shifted_scales(given):
    given.scales += 1


def no_bias(given):
    given.bias = None


def other_rows(given):
    given.a_div = 1


def other_results(given):
    given.out_type = {1: 2, 2: 1}.get(given.out_type, given.out_type)


@pytest.mark.parametrize(
    "change", [no_order, other_format, other_factor, shifted_scales, no_bias, other_rows, other_results]
)
def test_the_first_use_finds_wrong_kernels(change, launches):
    launches[1].append(change)
    assert not native.first_error("nvfp4", repeats=1, shape=SMALL) <= native.BOUND


@pytest.fixture
def operators(launches, monkeypatch):
    """The operators of a GPU of compute capability 12.x, on tensors of the CPU."""
    pytest.importorskip("triton")
    from fp4_ops.backends.triton import operators, tiles
    from fp4_ops.backends.triton.scaled import support

    monkeypatch.setattr(
        native, "takes", lambda w, a_format: scaled.takes(w.n, w.k) and a_format == w.fmt.name
    )
    monkeypatch.setattr(support, "takes", lambda *_: False)  # as with an older Triton on 12.1
    tiles.pretend(tiles.Device("like sm_121", (12, 1), 101376, 48))
    yield operators
    tiles.pretend(None)


@pytest.mark.skipif(not EMULATED, reason="tensors of the CPU")
@pytest.mark.parametrize("format", FORMATS)
def test_operators(format, operators, launches):
    """Every product takes the kernels, where K and N fit, and gives what the CPU's operator gives."""
    m, g, n, k = 21, 3, 40, 192
    w = reference.random_weight(format, g, n, k)
    options = {"format": format, "out_dtype": torch.float32}
    a, b = reference.random_activations(m, k, kind=format), reference.random_activations(g, 7, k, kind=format)
    ids = torch.randint(-1, g + 1, (m,))
    offs = torch.randint(0, m, (g,)).sort().values.int()
    one = [None if t is None else t[0] for t in w.operands()]
    calls = {
        "mm": (a, one, ()),
        "grouped_mm": (a, w.operands(), (offs,)),
        "grouped_mm_masked": (b, w.operands(), (torch.tensor([0, 9, 4]).int().clamp(max=7),)),
        "indexed_mm": (a, w.operands(), (ids,)),
    }
    for name, (x, weights, args) in calls.items():
        given = {"a_scale": x.scale, "a_global_scale": x.global_scale, "a_format": format}
        got = getattr(operators, name)(x.data, *weights, *args, **given, **options)
        want = getattr(torch.ops.fp4, name)(x.data, *weights, *args, **given, **options)
        assert (got - want).norm() <= 2e-6 * want.norm()
    assert len(launches[0]) == len(calls)


@pytest.mark.skipif(not EMULATED, reason="tensors of the CPU")
@pytest.mark.parametrize("format", FORMATS)
def test_experts(format, operators, launches, monkeypatch):
    """The two products of fp4::moe: rows by their experts' ids, and rows that are read by several experts."""
    from fp4_ops.backends.triton import ops
    from fp4_ops.backends.triton.scaled import ops as scaled_ops
    from fp4_ops.meta.formats import FORMATS as TABLE
    from fp4_ops.meta.gates import apply_gate

    def quantized(x, fmt):
        packed, scale, factor = torch.ops.fp4.quantize(x[:, None].float(), fmt.name)
        factor = factor if fmt.has_global_scale else None
        return scaled.Rows(packed[:, 0], scale[:, 0].view(torch.uint8), factor)

    def gated(y, k, activation):
        return apply_gate(y, activation)

    monkeypatch.setattr(scaled_ops, "_quantized", quantized)
    monkeypatch.setattr(scaled_ops, "gated", gated)
    tokens, top_k, experts, hidden, inner = 9, 2, 4, 64, 128
    up = reference.random_weight(format, experts, 2 * inner, hidden)
    down = reference.random_weight(format, experts, hidden, inner)
    x = torch.randn(tokens, hidden)
    ids = torch.rand(tokens, experts).topk(top_k).indices
    args = [
        ops.WeightArgs(
            w.packed, w.scale.view(torch.uint8), w.global_scale, None, experts, n, k, TABLE[format]
        )
        for w, n, k in ((up, 2 * inner, hidden), (down, hidden, inner))
    ]  # fmt: skip
    got = scaled_ops._experts(x, ids, *args, "silu").view(tokens, top_k, hidden).sum(1)
    want = torch.ops.fp4.moe(
        x, ids, torch.ones(tokens, top_k), *up.operands(), *down.operands(), format=format, a_format=format
    )
    assert len(launches[0]) == 2
    # Sums in another order round a few hidden values to another code.
    assert (got - want).norm() <= 2e-2 * want.norm()
