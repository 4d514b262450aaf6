"""mm, grouped_mm, grouped_mm_masked and indexed_mm against float64 over exactly dequantised operands."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from conftest import poison_malloc, poisoned
from reference import (
    FORMATS,
    assert_close,
    assert_rows_close,
    indexed_mm,
    m_indices,
    masked_indices,
    mm,
    random_activations,
    random_weight,
)

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class Case:
    name: str
    rows: tuple[int, ...]  # of each expert
    n: int
    k: int
    past: int = 0  # rows past offs[-1]

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("odd", rows=(3, 0, 7, 1, 0), n=577, k=94, past=2),
    Case("long_k", rows=(2, 9), n=33, k=2 * 727),
    Case("short_block", rows=(4, 0, 3), n=48, k=48),
    Case("one_row", rows=(0, 1, 0, 0), n=64, k=64),
    Case("one_expert", rows=(17,), n=40, k=128),
    Case("all_in_one", rows=(0, 0, 70), n=64, k=96, past=5),
    Case("all_past", rows=(0, 0, 0), n=32, k=64, past=4),
    Case("no_rows", rows=(0, 0), n=32, k=64),
    Case("one_column", rows=(3, 2), n=1, k=32),
    Case("two_k", rows=(3, 2), n=16, k=2),
    Case("tiles", rows=(64, 0, 33), n=128, k=256),
)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8}
OUT_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "tile16")


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return request.param


@pytest.fixture(params=FORMATS)
def format(request) -> str:
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request, device) -> str:
    if device == "cuda" and request.param == "tile16":
        pytest.skip("tile16 is a CPU layout")
    return request.param


@pytest.fixture(params=DTYPES)
def a_dtype(request, device) -> torch.dtype:
    if device == "cuda" and request.param == "int8":
        pytest.skip("int8 activations run on the CPU only")
    return DTYPES[request.param]


def variants(a_dtype: torch.dtype, *bias_shape: int, device: str):
    """Every out_dtype, with and without a bias of every dtype in turn."""
    biases = (None, torch.float32, torch.bfloat16, torch.float16)
    for (out_dtype, with_bias), bias_dtype in zip(
        itertools.product(OUT_DTYPES, (False, True)), itertools.cycle(biases[1:])
    ):
        bias = torch.randn(bias_shape).to(bias_dtype).to(device) if with_bias else None
        want = out_dtype or (torch.bfloat16 if a_dtype == torch.int8 else a_dtype)
        yield bias, out_dtype, want


def test_mm(case, format, a_dtype, layout, device):
    w = random_weight(format, case.n, case.k, device=device, layout=layout)
    a, a_scale, exact = random_activations(sum(case.rows), case.k, dtype=a_dtype, device=device)
    for bias, out_dtype, dtype in variants(a_dtype, case.n, device=device):
        with poisoned():
            out = fp4.mm(a, *w.operands(), a_scale, bias, **w.options(), out_dtype=out_dtype)
        want = mm(exact, w.dense, bias)
        assert_close(out, want, dtype, case.k)
        assert_rows_close(out, exact, w.dense, want, dtype)


def test_grouped_mm(case, format, a_dtype, layout, device):
    groups, m = len(case.rows), sum(case.rows) + case.past
    w = random_weight(format, groups, case.n, case.k, device=device, layout=layout)
    a, a_scale, exact = random_activations(m, case.k, dtype=a_dtype, device=device)
    offs = torch.tensor(case.rows, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    ids = m_indices(offs, m)
    for bias, out_dtype, dtype in variants(a_dtype, groups, case.n, device=device):
        with poisoned():
            out = fp4.grouped_mm(a, *w.operands(), offs, a_scale, bias, **w.options(), out_dtype=out_dtype)
        want = indexed_mm(exact, w.dense, ids, bias)
        assert_close(out, want, dtype, case.k)
        assert_rows_close(out, exact, w.dense[ids], want, dtype)
        assert (out[ids < 0] == 0).all()


def test_grouped_mm_masked(case, format, a_dtype, layout, device):
    groups, max_m = len(case.rows), max(case.rows) + case.past
    w = random_weight(format, groups, case.n, case.k, device=device, layout=layout)
    a, a_scale, exact = random_activations(groups, max_m, case.k, dtype=a_dtype, device=device)
    masked_m = torch.tensor(case.rows, dtype=torch.int32, device=device)
    ids = masked_indices(masked_m, max_m)
    flat = exact.flatten(0, 1)
    for bias, out_dtype, dtype in variants(a_dtype, groups, case.n, device=device):
        with poisoned():
            out = fp4.grouped_mm_masked(
                a, *w.operands(), masked_m, a_scale, bias, **w.options(), out_dtype=out_dtype
            )
        assert out.shape == (groups, max_m, case.n)
        want = indexed_mm(flat, w.dense, ids.flatten(), bias)
        assert_close(out.flatten(0, 1), want, dtype, case.k)
        assert_rows_close(out.flatten(0, 1), flat, w.dense[ids.flatten()], want, dtype)
        assert (out[ids < 0] == 0).all()


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["ids32", "ids64"])
def test_indexed_mm(case, format, a_dtype, layout, device, id_dtype):
    groups, m = len(case.rows), sum(case.rows) + case.past
    w = random_weight(format, groups, case.n, case.k, device=device, layout=layout)
    a, a_scale, exact = random_activations(m, case.k, dtype=a_dtype, device=device)
    ids = torch.randint(-1, groups + 1, (m,), dtype=id_dtype, device=device)  # -1 and G: not on this rank
    inside = torch.where(ids < groups, ids, -1)
    for bias, out_dtype, dtype in variants(a_dtype, groups, case.n, device=device):
        with poisoned():
            out = fp4.indexed_mm(a, *w.operands(), ids, a_scale, bias, **w.options(), out_dtype=out_dtype)
        want = indexed_mm(exact, w.dense, inside, bias)
        assert_close(out, want, dtype, case.k)
        assert_rows_close(out, exact, w.dense[inside], want, dtype)
        assert (out[inside < 0] == 0).all()


def test_extreme_ids_give_zero_rows(format, device):
    w = random_weight(format, 3, 20, 64, device=device)
    big = torch.iinfo(torch.int64)
    ids = torch.tensor([big.min, -(2**32), 2**32, 2**32 + 1, big.max, 2], device=device)
    a, _, exact = random_activations(len(ids), 64, dtype=torch.float32, device=device)
    out = fp4.indexed_mm(a, *w.operands(), ids, **w.options())
    assert (out[:-1] == 0).all()
    assert_close(out[-1:], mm(exact[-1:], w.dense[2]), torch.float32, 64)


def test_noncontiguous_operands(format, a_dtype, layout, device):
    """Strides are honoured: transposed, sliced and expanded inputs give what their copies give."""
    groups, n, k, m = 3, 33, 64, 8
    w = random_weight(format, groups, n, k, device=device, layout=layout)
    a, a_scale, _ = random_activations(m, k, dtype=a_dtype, device=device)
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=device)
    bias = torch.randn(groups, n, device=device)

    def strided(t):
        """The same values behind other strides."""
        if t is None or t.dim() == 0:
            return t
        view = torch.empty((*t.shape[:-1], t.shape[-1] * 2), dtype=torch.uint8, device=device)
        view = view.repeat_interleave(t.element_size(), -1).view(t.dtype)[..., ::2]
        view.copy_(t)
        assert t.numel() < 2 or not view.is_contiguous()
        return view

    want = fp4.grouped_mm(a, *w.operands(), offs, a_scale, bias, **w.options())
    got = fp4.grouped_mm(
        strided(a), *map(strided, w.operands()), strided(offs), strided(a_scale), strided(bias), **w.options()
    )
    assert torch.equal(got, want)
    transposed = a.t().contiguous().t()
    assert torch.equal(fp4.grouped_mm(transposed, *w.operands(), offs, a_scale, bias, **w.options()), want)


def test_float4_dtype_is_accepted(format, device):
    w = random_weight(format, 24, 64, device=device)
    a, _, _ = random_activations(3, 64, dtype=torch.bfloat16, device=device)
    packed = w.packed.view(torch.float4_e2m1fn_x2)
    got = fp4.mm(a, packed, w.scale, w.global_scale, **w.options())
    assert torch.equal(got, fp4.mm(a, *w.operands(), **w.options()))


def test_infinity_and_nan_stay_in_their_row(format, layout, device):
    """What one token holds never reaches another: rows are tiled, and a tile must not mix them."""
    w = random_weight(format, 2, 40, 64, device=device, layout=layout)
    a, _, exact = random_activations(9, 64, dtype=torch.bfloat16, device=device)
    a[4] = torch.nan
    offs = torch.tensor([3, 9], dtype=torch.int32, device=device)
    out = fp4.grouped_mm(a, *w.operands(), offs, **w.options())
    assert out[4].isnan().all()
    rows = [r for r in range(9) if r != 4]
    want = indexed_mm(exact, w.dense, m_indices(offs, 9))
    assert_close(out[rows], want[rows], torch.bfloat16, 64)


@pytest.mark.parametrize("count", [7, 100, 5000, 10**6])
def test_poison_works(count, device):
    """`poisoned` really fills what an allocation returns (on the CPU below at::empty, in the C library)."""
    if device == "cpu" and not poison_malloc(True):
        pytest.skip("this C library has no mallopt")
    with poisoned():
        if device == "cpu":
            torch.utils.deterministic.fill_uninitialized_memory = False
        for _ in range(3):
            memory = torch.empty(count, device=device)
            assert (memory.isnan() if device == "cuda" else memory < -1e38).all()
            memory.zero_()
            del memory


def test_threads_do_not_change_the_result(format, a_dtype):
    threads = torch.get_num_threads()
    w = random_weight(format, 3, 100, 192)
    a, a_scale, _ = random_activations(50, 192, dtype=a_dtype)
    offs = torch.tensor([20, 21, 50], dtype=torch.int32)
    try:
        outs = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            outs.append(
                fp4.grouped_mm(a, *w.operands(), offs, a_scale, **w.options(), out_dtype=torch.float32)
            )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
