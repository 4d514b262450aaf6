"""Linear layers of few rows (csrc/sm90/linears.cuh) against float64: every division and epilogue."""

import ctypes
import random
from typing import NamedTuple

import pytest
import torch
from test_sm90_gpu import BOUND, error, pytestmark

from fp4_ops.backends import anywhere
from fp4_ops.backends.launchers import library

__all__ = ["pytestmark"]

pointer, number = ctypes.c_void_p, ctypes.c_int
CODES = {torch.bfloat16: 1, torch.float16: 2}
EPS = 1e-6
PREPARED = 16
"""kMostPreparedRows of csrc/device/linears.h."""


class Weight(ctypes.Structure):
    """LinearWeight of csrc/device/linears.h."""

    _fields_ = [
        *((name, pointer) for name in ("values", "bias", "out", "scale")),
        *((name, number) for name in ("n", "tiles_end")),
    ]


class Params(ctypes.Structure):
    """LinearsParams of csrc/device/linears.h."""

    _fields_ = [
        *((name, pointer) for name in ("x", "addend", "sum", "norm_weight", "normed", "residual")),
        ("weight", Weight * 3),
        *((name, number) for name in ("count", "rows", "k")),
        ("eps", ctypes.c_float),
        *((name, number) for name in ("type", "bias_type")),
        *((name, ctypes.c_bool) for name in ("early", "norm_in_float", "fp8")),
        *((name, number) for name in ("cluster_bits", "group", "clusters", "depth")),
        ("launchers", number * 24),
    ]


class Case(NamedTuple):
    x: torch.Tensor
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    norm: torch.Tensor | None
    residual: torch.Tensor | None
    norm_in_float: bool
    addend: torch.Tensor | None
    scales: list[torch.Tensor] | None
    """One factor for each row of a weight in fp8."""

    @property
    def values(self) -> list[torch.Tensor]:
        """The weights in float64."""
        weights = [w.double() for w in self.weights]
        return [w * s.double()[:, None] for w, s in zip(weights, self.scales)] if self.scales else weights

    @property
    def rows(self) -> torch.Tensor:
        """The rows before the norm."""
        return self.x if self.addend is None else self.x + self.addend


def normed(case: Case) -> torch.Tensor:
    """The rows that are multiplied, as a model computes them."""
    given = case.rows, [case.rows[:1]], [None], case.norm, EPS, None
    return anywhere.linears(*given, keep_norm=True, norm_in_float=case.norm_in_float)[1]


def expected(case: Case) -> list[torch.Tensor]:
    rows = case.rows if case.norm is None else normed(case)
    made = [rows.double() @ w.T for w in case.values]
    made = [y if b is None else y + b.double() for y, b in zip(made, case.biases)]
    if case.residual is None:
        return made
    return [y.to(case.x.dtype).double() + case.residual.double() for y in made]


def random_case(rows: int, steps: int, sizes: list[int], dtype: torch.dtype, fp8: bool) -> Case:
    k = 64 * steps

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    x = (torch.randn(rows, k, device="cuda") * torch.rand(rows, 1, device="cuda") * 4).to(dtype)
    weights, scales = [draw(n, k, scale=k**-0.5) for n in sizes], None
    if fp8:
        scales = [torch.rand(n, device="cuda") + 0.1 for n in sizes]
        weights = [(draw(n, k) * 10).float().clamp(-448, 448).to(torch.float8_e4m3fn) for n in sizes]
    biases = [draw(n) if random.random() < 0.5 else None for n in sizes]
    norm = draw(k) if random.random() < 0.5 else None
    residual = draw(rows, sizes[0]) if len(sizes) == 1 and random.random() < 0.5 else None
    in_float = norm is not None and random.random() < 0.5
    addend = draw(rows, k) if random.random() < 0.5 else None
    return Case(x, weights, biases, norm, residual, in_float, addend, scales)


def as_they_are(case: Case) -> Case:
    """The case without what the kernel does not do for many rows, which it copies."""
    return case._replace(norm=None, norm_in_float=False, addend=None)


def launch(
    case: Case,
    division: tuple[int, int, int, int],
    keep: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Runs the kernel as `division` says."""

    def at(t: torch.Tensor | None) -> int | None:
        return None if t is None else t.data_ptr()

    rows, k = case.x.shape
    sizes = [w.shape[0] for w in case.weights]
    outs = [torch.full((rows, n), float("nan"), device="cuda", dtype=case.x.dtype) for n in sizes]
    p = Params(x=at(case.x), norm_weight=at(case.norm), normed=at(keep), residual=at(case.residual))
    total = torch.empty_like(case.x) if total is None else total
    if case.addend is not None:
        p.addend, p.sum = at(case.addend), at(total)
    for i, (w, bias, out) in enumerate(zip(case.weights, case.biases, outs)):
        scale = None if case.scales is None else case.scales[i]
        p.weight[i] = Weight(at(w), at(bias), at(out), at(scale), sizes[i])
    p.count, p.rows, p.k, p.eps = len(outs), rows, k, EPS
    p.type = p.bias_type = CODES[case.x.dtype]
    p.early, p.norm_in_float, p.fp8 = random.random() < 0.5, case.norm_in_float, case.scales is not None
    p.cluster_bits, p.group, p.clusters, p.depth = division
    stream = torch.cuda.current_stream().cuda_stream
    loaded = library.library()
    assert loaded is not None
    error = loaded.fp4_kernel_linears(ctypes.byref(p), library.multiprocessors(0), pointer(stream))
    assert error == 0, division
    torch.cuda.synchronize()
    return outs


def random_division(cluster_bits: int, group: int, rows: int) -> tuple[int, int, int, int]:
    depths = (8, 6, 4, 3) if rows <= 32 else (3,)  # more rows and their sums leave less shared memory
    return cluster_bits, group, random.choice((0, 0, 1, 3)), random.choice(depths)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("cluster_bits", range(4))
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", CODES)
def test_every_division(dtype, fp8, cluster_bits, group):
    """Rows of every kernel, odd N, K of fewer steps than there are warps, one to three weights."""
    for rows in (1, *(random.randint(most // 2 + 1, most) for most in (8, 16, 32, 64))):
        sizes = [random.choice((1, 7, 16, 24, 128, 200)) for _ in range(random.randint(1, 3))]
        case = random_case(rows, random.randint(1, 9 if rows <= 32 else 4), sizes, dtype, fp8)
        case = case if rows <= PREPARED else as_they_are(case)
        keep = torch.full_like(case.x, float("nan")) if case.norm is not None else None
        division = random_division(cluster_bits, group, rows)
        total = torch.full_like(case.x, float("nan"))
        got = launch(case, division, keep, total)
        for y, want in zip(got, expected(case)):
            assert error(y, want) < BOUND[dtype], (rows, case.x.shape, sizes, division)
        if keep is not None:
            assert error(keep, normed(case).double()) < BOUND[dtype] / 4
        assert case.addend is None or torch.equal(total, case.rows)
        again = launch(case, (*division[:2], 1 + division[2], 3))
        assert all(map(torch.equal, got, again)), "bits depend on the grid"


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", CODES)
def test_operator(dtype, fp8):
    for rows in (1, 4, 16, 31, 64, 100):  # fp8 takes more rows in several launches
        if rows > 64 and not fp8:
            continue
        case = random_case(rows, random.randint(1, 5), [40, 16, 128], dtype, fp8)
        case = case if rows <= PREPARED or (fp8 and random.random() < 0.5) else as_they_are(case)
        keep = case.norm is not None
        wide = None if case.addend is None else torch.cat([case.addend, case.addend], -1)[:, None]
        addend = None if wide is None else wide[..., : case.x.shape[1]]
        given = case.x[:, None].clone(), case.weights, case.biases, case.norm, EPS, None, addend
        options = {"keep_norm": keep, "norm_in_float": case.norm_in_float}
        got = torch.ops.fp4.linears(*given, case.scales, early=True, **options)
        want = expected(case) + ([normed(case).double()] if keep else [])
        want += [] if addend is None else [case.rows.double()]
        assert [y.shape for y in got] == [(rows, 1, y.shape[1]) for y in want]
        for y, right in zip(got, want):
            assert error(y[:, 0], right) < BOUND[dtype]
    for rows in (2, 30, 60):
        if rows > 32 and not fp8:
            continue  # torch's product is faster
        residual = torch.randn(rows, 48, device="cuda").to(dtype)
        case = random_case(rows, 2, [48], dtype, fp8)._replace(residual=residual)
        case = case if rows <= PREPARED or fp8 else as_they_are(case)
        given = case.x, case.weights, case.biases, case.norm, EPS, case.residual, case.addend, case.scales
        got, *_ = torch.ops.fp4.linears(*given, norm_in_float=case.norm_in_float)
        assert error(got, expected(case)[0]) < BOUND[dtype]


def test_others_run_torch():
    """More rows than the kernel takes, K that is no multiple of 64, weights that lie apart, float32; the same
    with weights in fp8."""
    for rows, k, dtype in ((33, 128, torch.bfloat16), (3, 96, torch.float16), (3, 128, torch.float32)):
        x, w = (torch.randn(n, k, device="cuda").to(dtype) for n in (rows, 24))
        (got,) = torch.ops.fp4.linears(x, [w], [None], None, EPS, None)
        assert error(got, x.double() @ w.double().T) < 1e-2
    for rows, k in ((129, 128), (3, 96)):
        case = random_case(rows, 1, [24], torch.bfloat16, fp8=True)
        x = torch.randn(rows, k, device="cuda").bfloat16()
        w = torch.randn(24, k, device="cuda").to(torch.float8_e4m3fn)
        (got,) = torch.ops.fp4.linears(x, [w], [None], None, EPS, None, None, case.scales)
        assert error(got, x.double() @ (w.double() * case.scales[0].double()[:, None]).T) < 1e-2
    w = torch.randn(128, 24, device="cuda").bfloat16().T
    (got,) = torch.ops.fp4.linears(x.bfloat16(), [w], [None], None, EPS, None)
    assert error(got, x.bfloat16().double() @ w.double().T) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16])
def test_an_addend_is_added_first(dtype, rows):
    def draw(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    for k, sizes in ((2048, (4096, 512, 512)), (2048, (128,)), (64, (48,)), (4096, (1000, 33))):
        x, addend, norm = draw(rows, k), draw(rows, k), draw(k)
        given = x, [draw(n, k) / 32 for n in sizes], [None] * len(sizes), norm, 1e-6, None, addend
        for keep in (False, True):
            got = torch.ops.fp4.linears(*given, keep_norm=keep)
            want = anywhere.linears(*given, keep_norm=keep)
            assert torch.equal(got[-1], want[-1])
            for y, its in zip(got, want, strict=True):
                assert (y.double() - its.double()).norm() < 4e-3 * its.double().norm()
