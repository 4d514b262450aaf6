"""mm, grouped_mm, grouped_mm_masked and indexed_mm against float64 over exactly dequantised operands."""

from __future__ import annotations

import itertools
import platform
import re
from dataclasses import dataclass

import pytest
import torch
from conftest import poison_malloc, poisoned
from reference import (
    BLOCK,
    FP4_FORMATS,
    KERNEL_FORMATS,
    ProductBounds,
    assert_close,
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
KINDS = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn, "nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
OUT_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "tile16")


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return request.param


@pytest.fixture(params=KERNEL_FORMATS)
def format(request) -> str:
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request, device) -> str:
    if device == "cuda" and request.param == "tile16":
        pytest.skip("tile16 is a CPU layout")
    return request.param


@pytest.fixture(params=KINDS)
def kind(request, device) -> torch.dtype | str:
    if device == "cuda" and request.param == "int8":
        pytest.skip("int8 activations run on the CPU only")
    return KINDS[request.param]


def options(w, a) -> dict:
    return {**w.options(), **a.options()}


def variants(kind: torch.dtype | str, *bias_shape: int, device: str):
    """Every out_dtype, with and without a bias of every dtype in turn."""
    biases = (None, torch.float32, torch.bfloat16, torch.float16)
    for (out_dtype, with_bias), bias_dtype in zip(
        itertools.product(OUT_DTYPES, (False, True)), itertools.cycle(biases[1:])
    ):
        bias = torch.randn(bias_shape).to(bias_dtype).to(device) if with_bias else None
        own = kind in (torch.float32, torch.bfloat16, torch.float16)
        want = out_dtype or (kind if own else torch.bfloat16)
        yield bias, out_dtype, want


def with_bias(product: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor | None = None):
    """The product plus each row's bias, of which rows of no expert have none."""
    if bias is None:
        return product
    rows = bias if ids is None else bias[ids.clamp(min=0).long()] * (ids >= 0)[:, None]
    return product + rows.double()


@pytest.mark.one_in(3)
def test_mm(case, format, kind, layout, device):
    w = random_weight(format, case.n, case.k, device=device, layout=layout)
    a = random_activations(sum(case.rows), case.k, kind=kind, device=device)
    product, bounds = mm(a.exact, w.dense), ProductBounds.of(a.exact, w.dense)
    for bias, out_dtype, dtype in variants(kind, case.n, device=device):
        with poisoned():
            out = fp4.mm(
                a.data,
                *w.operands(),
                a.scale,
                bias,
                a.global_scale,
                **options(w, a),
                out_dtype=out_dtype,
            )
        bounds.assert_close(out, with_bias(product, bias), dtype)


@pytest.mark.one_in(3)
def test_grouped_mm(case, format, kind, layout, device):
    groups, m = len(case.rows), sum(case.rows) + case.past
    w = random_weight(format, groups, case.n, case.k, device=device, layout=layout)
    a = random_activations(m, case.k, kind=kind, device=device)
    offs = torch.tensor(case.rows, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    ids = m_indices(offs, m)
    product, bounds = indexed_mm(a.exact, w.dense, ids), ProductBounds.of(a.exact, w.dense, ids)
    for bias, out_dtype, dtype in variants(kind, groups, case.n, device=device):
        with poisoned():
            out = fp4.grouped_mm(
                a.data,
                *w.operands(),
                offs,
                a.scale,
                bias,
                a.global_scale,
                **options(w, a),
                out_dtype=out_dtype,
            )
        bounds.assert_close(out, with_bias(product, bias, ids), dtype)
        assert (out[ids < 0] == 0).all()


@pytest.mark.one_in(3)
def test_grouped_mm_masked(case, format, kind, layout, device):
    groups, max_m = len(case.rows), max(case.rows) + case.past
    w = random_weight(format, groups, case.n, case.k, device=device, layout=layout)
    a = random_activations(groups, max_m, case.k, kind=kind, device=device)
    masked_m = torch.tensor(case.rows, dtype=torch.int32, device=device)
    ids = masked_indices(masked_m, max_m)
    flat, of_row = a.exact.flatten(0, 1), ids.flatten()
    product, bounds = indexed_mm(flat, w.dense, of_row), ProductBounds.of(flat, w.dense, of_row)
    for bias, out_dtype, dtype in variants(kind, groups, case.n, device=device):
        with poisoned():
            out = fp4.grouped_mm_masked(
                a.data,
                *w.operands(),
                masked_m,
                a.scale,
                bias,
                a.global_scale,
                **options(w, a),
                out_dtype=out_dtype,
            )
        assert out.shape == (groups, max_m, case.n)
        bounds.assert_close(out.flatten(0, 1), with_bias(product, bias, of_row), dtype)
        assert (out[ids < 0] == 0).all()


@pytest.mark.one_in(3)
def test_indexed_mm(case, format, kind, layout, device):
    groups, m = len(case.rows), sum(case.rows) + case.past
    w = random_weight(format, groups, case.n, case.k, device=device, layout=layout)
    a = random_activations(m, case.k, kind=kind, device=device)
    ids = torch.randint(-1, groups + 1, (m,), device=device)  # -1 and G: not on this rank
    inside = torch.where(ids < groups, ids, -1)
    product, bounds = indexed_mm(a.exact, w.dense, inside), ProductBounds.of(a.exact, w.dense, inside)
    for bias, out_dtype, dtype in variants(kind, groups, case.n, device=device):
        ids = ids.to(torch.int32 if ids.dtype == torch.int64 else torch.int64)
        with poisoned():
            out = fp4.indexed_mm(
                a.data,
                *w.operands(),
                ids,
                a.scale,
                bias,
                a.global_scale,
                **options(w, a),
                out_dtype=out_dtype,
            )
        bounds.assert_close(out, with_bias(product, bias, inside), dtype)
        assert (out[inside < 0] == 0).all()


@pytest.mark.parametrize("ends", [(32, 32, 96), (64,), (0, 94), (96, 96, 160, 178), (0, 0), ()], ids=str)
def test_grouped_mm_k(ends, format, kind, layout, device):
    """out[g] = a[:, begin:end] @ b[:, begin:end].T; a group without columns is zeros."""
    ends = tuple(end * BLOCK[format] // 32 if BLOCK[format] > 32 else end for end in ends)
    m, n, t = 5, 37, max(ends, default=0) + 34  # columns past the last end belong to no group
    if ends and ends[-1] % 32:
        t -= 34  # the last group may end at the end of K, which no block divides
    w = random_weight(format, n, t, device=device, layout=layout)
    a = random_activations(m, t, kind=kind, device=device)
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    columns = [slice(*pair) for pair in itertools.pairwise((0, *ends))]
    parts = [(a.exact[:, c], w.dense[:, c]) for c in columns]
    products = [(mm(*part), ProductBounds.of(*part)) for part in parts]
    for out_dtype in (torch.float32, torch.bfloat16):
        with poisoned():
            out = fp4.grouped_mm_k(
                a.data, *w.operands(), offs, a.scale, a.global_scale,
                **options(w, a), out_dtype=out_dtype,
            )  # fmt: skip
        assert out.shape == (len(ends), m, n)
        for got, (want, bounds) in zip(out, products, strict=True):
            bounds.assert_close(got, want, out_dtype)


def test_columns_of_other_groups_do_not_leak(format, layout):
    """NaN in one group's columns stays in that group, short last block or not."""
    block = max(32, BLOCK[format])
    k = 2 * block + 16
    w = random_weight(format, 8, k, layout=layout)
    a = random_activations(3, k, kind=torch.float32)
    a.data[:, 2 * block :] = torch.nan
    offs = torch.tensor([block, 2 * block, k], dtype=torch.int32)
    out = fp4.grouped_mm_k(a.data, *w.operands(), offs, **w.options())
    assert torch.isfinite(out[:2]).all() and out[2].isnan().all()


def test_extreme_ids_give_zero_rows(format, device):
    w = random_weight(format, 3, 20, 64, device=device)
    big = torch.iinfo(torch.int64)
    ids = torch.tensor([big.min, -(2**32), 2**32, 2**32 + 1, big.max, 2], device=device)
    a = random_activations(len(ids), 64, kind=torch.float32, device=device)
    out = fp4.indexed_mm(a.data, *w.operands(), ids, **w.options())
    assert (out[:-1] == 0).all()
    assert_close(out[-1:], mm(a.exact[-1:], w.dense[2]), torch.float32, 64)


def test_noncontiguous_operands(format, kind, layout, device):
    """Strides are honoured: transposed, sliced and expanded inputs give what their copies give."""
    groups, n, k, m = 3, 33, 64, 8
    w = random_weight(format, groups, n, k, device=device, layout=layout)
    a = random_activations(m, k, kind=kind, device=device)
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

    want = fp4.grouped_mm(a.data, *w.operands(), offs, a.scale, bias, a.global_scale, **options(w, a))
    rows = (strided(offs), strided(a.scale), strided(bias), strided(a.global_scale))
    got = fp4.grouped_mm(strided(a.data), *map(strided, w.operands()), *rows, **options(w, a))
    assert torch.equal(got, want)
    transposed = a.data.t().contiguous().t()
    assert torch.equal(fp4.grouped_mm(transposed, *w.operands(), *rows, **options(w, a)), want)


@pytest.mark.parametrize("format", FP4_FORMATS)
def test_float4_dtype_is_accepted(format, device):
    w = random_weight(format, 24, 64, device=device)
    a = random_activations(3, 64, kind=torch.bfloat16, device=device)
    packed = w.packed.view(torch.float4_e2m1fn_x2)
    got = fp4.mm(a.data, packed, w.scale, w.global_scale, **w.options())
    assert torch.equal(got, fp4.mm(a.data, *w.operands(), **w.options()))


def test_infinity_and_nan_stay_in_their_row(format, layout, device):
    """What one token holds never reaches another: rows are tiled, and a tile must not mix them."""
    w = random_weight(format, 2, 40, 64, device=device, layout=layout)
    a = random_activations(9, 64, kind=torch.bfloat16, device=device)
    a.data[4] = torch.nan
    offs = torch.tensor([3, 9], dtype=torch.int32, device=device)
    out = fp4.grouped_mm(a.data, *w.operands(), offs, **w.options())
    assert out[4].isnan().all()
    rows = [r for r in range(9) if r != 4]
    want = indexed_mm(a.exact, w.dense, m_indices(offs, 9))
    assert_close(out[rows], want[rows], torch.bfloat16, 64)


TCACHE = 1032
"""Bytes of the largest blocks that glibc keeps for a thread."""


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


@pytest.mark.parametrize("count", [7, 100, 5000, 10**6])
def test_poison_works(count, device):
    """`poisoned` really fills what an allocation returns (on the CPU below at::empty, in the C library)."""
    if device == "cpu" and not poison_malloc(True):
        pytest.skip("this C library has no mallopt")
    if device == "cpu" and platform.machine() == "aarch64":
        pytest.skip("torch has an allocator of its own there (mimalloc); at::empty is poisoned all the same")
    libc, version = platform.libc_ver()
    if device == "cpu" and libc == "glibc" and version_of(version) >= (2, 38) and count * 4 <= TCACHE:
        pytest.skip("this glibc hands out small aligned blocks as they were freed; at::empty is poisoned")
    with poisoned():
        if device == "cpu":
            torch.utils.deterministic.fill_uninitialized_memory = False
        for _ in range(3):
            memory = torch.empty(count, device=device)
            assert (memory.isnan() if device == "cuda" else memory < -1e38).all()
            memory.zero_()
            del memory


def test_threads_do_not_change_the_result(format, kind):
    threads = torch.get_num_threads()
    w = random_weight(format, 3, 100, 192)
    a = random_activations(50, 192, kind=kind)
    offs = torch.tensor([20, 21, 50], dtype=torch.int32)
    try:
        outs = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            outs.append(
                fp4.grouped_mm(
                    a.data,
                    *w.operands(),
                    offs,
                    a.scale,
                    None,
                    a.global_scale,
                    **options(w, a),
                    out_dtype=torch.float32,
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
