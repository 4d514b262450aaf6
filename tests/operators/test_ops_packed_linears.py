"""packed_linears: each product has the bits of `mm`, which tests compare with float64."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import poisoned
from reference import FORMATS, Weight, random_weight

fp4 = torch.ops.fp4


def drawn(format: str, layout: str, sizes: tuple[int, ...], rows: int, dtype: torch.dtype, device: str):
    k = random.choice((64, 96, 2 * 47, 320))
    a = torch.randn(rows, k, device=device).to(dtype)
    weights: list[Weight] = []
    while len({w.operands()[1].dtype for w in weights}) != 1:  # int4 has several dtypes
        weights = [random_weight(format, n, k, device=device, layout=layout) for n in sizes]
    bias = [random.choice((None, torch.randn(n, device=device).to(dtype))) for n in sizes]
    return a, weights, bias


@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("a_format", ["none", "int8"])
@pytest.mark.parametrize("layout", ["plain", "tile16", "tile16_invariant"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.one_in(2)
def test_bits_of_mm(format, layout, a_format, rows):
    dtype = random.choice((torch.float32, torch.bfloat16, torch.float16))
    sizes = random.choice(((1,), (33, 5), (160, 16, 16), (16, 577, 48, 1)))
    out_dtype = random.choice((None, torch.float32, torch.bfloat16))
    a, weights, bias = drawn(format, layout, sizes, rows, dtype, "cpu")
    operands = [list(each) for each in zip(*(w.operands() for w in weights))]
    how = {"format": format, "layout": layout}
    with poisoned():
        made = fp4.packed_linears(a, *operands, bias, **how, a_format=a_format, out_dtype=out_dtype)
    read, scale = fp4.quantize_int8(a) if a_format == "int8" else (a, None)
    for w, b, got in zip(weights, bias, made, strict=True):
        want = fp4.mm(read, *w.operands(), scale, b, **how, out_dtype=out_dtype or dtype)
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"b": []}, "b is empty"),
        ({"bias": [None]}, "bias has 1 entries; b has 2"),
        ({"b_scale": 1}, "b_scale has 1 entries; b has 2"),
        ({"b_global_scale": 1}, "b_global_scale has 1 entries; b has 2"),
        ({"a_format": "fp8"}, "a_format is 'fp8'; it must be 'none' or 'int8'"),
        ({"a": torch.int8}, "a has dtype int8"),
        ({"a": 5}, "a has 10 columns"),
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_refusals(change, words, fake):
    a, weights, _ = drawn("nvfp4", "plain", (16, 32), 2, torch.float32, "cpu")
    b, b_scale, b_global_scale = (list(each) for each in zip(*(w.operands() for w in weights)))
    given = {"a": a, "b": b, "b_scale": b_scale, "b_global_scale": b_global_scale, "bias": [None, None]}
    options = {"format": "nvfp4", "a_format": "int8"}
    for name, value in change.items():
        if name == "a":
            given["a"] = a.to(value) if isinstance(value, torch.dtype) else torch.randn(2, 2 * value)
        elif name == "a_format":
            options["a_format"] = value
        else:
            given[name] = value if isinstance(value, list) else given[name][:value]
    if fake:
        given = {
            name: [x if x is None else x.to("meta") for x in value]
            if isinstance(value, list)
            else value.to("meta")
            for name, value in given.items()
        }
    with pytest.raises(RuntimeError, match=words):
        fp4.packed_linears(*given.values(), **options)


def test_block_scales_of_two_dtypes_are_refused():
    a, (w,), _ = drawn("int4", "plain", (16,), 2, torch.float32, "cpu")
    b, b_scale, factor = w.operands()
    scales = [b_scale.to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(RuntimeError, match="b_scale has bfloat16 and float32; all must be the same"):
        fp4.packed_linears(a, [b, b], scales, [factor, factor], [None, None], format="int4")


@pytest.mark.gpu
def test_int8_activations_are_refused_on_a_gpu():
    a, (w,), _ = drawn("int4", "plain", (16,), 2, torch.float32, "cuda")
    b, b_scale, factor = w.operands()
    with pytest.raises(RuntimeError, match=r"a_format is 'int8'; .* CPU only. On cuda it must be 'none'"):
        fp4.packed_linears(a, [b], [b_scale], [factor], [None], format="int4", a_format="int8")
