"""Linear layers in fp8: `FP8Linear`, and `prepare` with attention="fp8", dense="fp8" and head="fp8"."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fp4_ops
from fp4_ops.models.fp8_linear import CODES, FP8Linear, put_fp8, quantize_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def layer(k: int = 67, n: int = 33, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> FP8Linear:
    """Returns a layer whose rows have very different sizes, and one row of zeros."""
    linear = nn.Linear(k, n, bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.normal_().mul_(torch.exp2(torch.randint(-6, 3, (n, 1))))
        linear.weight[torch.randint(n, ())] = 0
    return put_fp8(linear)


def in_float64(linear: FP8Linear, x: torch.Tensor) -> torch.Tensor:
    """Computes the layer's result from its own codes and scales."""
    y = (x.double() @ linear.weight.detach().double().T) * linear.weight_scale.double()
    return y if linear.bias is None else y + linear.bias.detach().double()


def same(a: FP8Linear, b: FP8Linear) -> None:
    """Asserts that two layers have the same codes, scales and bias."""
    assert type(a) is type(b) is FP8Linear and a.weight.dtype == b.weight.dtype == CODES
    for name, t in a.state_dict().items():
        raw = t.view(torch.uint8) if t.dtype == CODES else t
        other = b.state_dict()[name]
        assert torch.equal(raw, other.view(torch.uint8) if t.dtype == CODES else other), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest(dtype):
    """No e4m3 is nearer to a value, and the largest value of a row is the largest e4m3."""
    n, k = int(torch.randint(1, 40, ())), int(torch.randint(1, 90, ()))
    weight = (torch.randn(n, k) * torch.exp2(torch.randint(-9, 9, (n, 1)))).to(dtype)
    weight[torch.randint(n, ())] = 0
    codes, scale = quantize_rows(weight)
    largest = weight.float().abs().amax(1)
    assert torch.equal(scale, torch.where(largest > 0, largest / 448, 1)) and codes.dtype == CODES
    assert torch.equal(codes.float().abs().amax(1), torch.where(largest > 0, 448.0, 0.0))
    every = torch.arange(256, dtype=torch.uint8).view(CODES).double()
    every = every[every.isfinite()]
    units = weight.double() / scale[:, None].double()
    best = (units[..., None] - every).abs().amin(-1)
    assert ((units - codes.double()).abs() <= best * (1 + 1e-6) + 1e-5).all()


def test_ties_are_rounded_to_even_and_tiny_rows_have_a_scale():
    codes, scale = quantize_rows(torch.tensor([[448.0, 17, 19, -17, -19, 2.0**-10, 3 * 2.0**-10]]))
    assert scale.item() == 1
    assert codes.float().tolist() == [[448, 16, 20, -16, -20, 0, 2.0**-8]]
    codes, scale = quantize_rows(torch.tensor([[1e-40, 0.0], [0.0, 0.0]]))
    assert scale.isfinite().all() and (scale > 0).all() and codes.float().isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results(dtype, bias):
    linear = layer(bias=bias, dtype=dtype)
    wide = torch.randn(4, 5, 2 * 67).to(dtype)
    for x in (wide[0, :, :67], wide[..., :67], wide[:, -1:, 67:], wide[0, 0, :67], wide[:0, :, :67]):
        with torch.no_grad():
            y = linear(x)
        want = in_float64(linear, x)
        assert y.dtype == dtype and y.shape == want.shape
        size = x.double().abs() @ linear.dequantize(torch.float64).abs().T + want.abs()
        assert ((y.double() - want).abs() <= 2 * EPS[dtype] * size + 1e-30).all()


def test_wrong_inputs():
    linear = layer()
    with pytest.raises(RuntimeError, match="weight has 67 columns; x has 134"):
        linear(torch.randn(3, 134, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="bias"):  # nn.Linear takes no other dtype either
        linear(torch.randn(3, 67))
    assert layer(bias=False)(torch.randn(3, 67)).dtype == torch.float32


def test_autocast_has_the_dtypes_of_a_linear():
    linear, plain = layer(dtype=torch.float32), nn.Linear(67, 33)
    for dtype in DTYPES:
        x = torch.randn(3, 67).to(dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
            assert y.dtype == plain(x).dtype == torch.bfloat16
        assert torch.allclose(y.double(), in_float64(linear, x.bfloat16()), rtol=0.05, atol=0.5)


def test_no_gradient_passes():
    x = torch.randn(3, 67, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="fp4::fp8_linear has no gradient"):
        layer()(x).sum().backward()


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.float16),
    "to a tensor's": lambda m: m.to(torch.empty(1, dtype=torch.float16)),
    "to a device, too": lambda m: m.to("cpu", torch.float32),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_casts_leave_codes_and_scales(cast):
    linear = layer()
    before, plain = copy.deepcopy(linear), cast(nn.Sequential(nn.Linear(67, 33)))
    model = cast(nn.Sequential(linear))
    dtype = plain[0].bias.dtype
    assert model[0] is linear and linear.bias.dtype == dtype
    linear.bias.data = linear.bias.data.bfloat16()  # which holds all the values
    same(linear, before)
    linear.bias.data = linear.bias.data.to(dtype)
    assert linear(torch.randn(2, 67, dtype=dtype)).dtype == dtype


def test_moves_and_copies(tmp_path):
    linear = layer()
    same(copy.deepcopy(linear), linear)
    same(pickle.loads(pickle.dumps(linear)), linear)
    torch.save(linear, tmp_path / "layer.pt")
    same(torch.load(tmp_path / "layer.pt", weights_only=False), linear)
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    other = FP8Linear(67, 33, dtype=torch.bfloat16)
    assert other.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    same(other, linear)
    assert linear.share_memory().weight.is_shared() and linear.weight_scale.is_shared()
    meta = copy.deepcopy(linear).to("meta", torch.float16)
    assert {t.device.type for t in meta.state_dict().values()} == {"meta"} and meta.weight.dtype == CODES
    empty = meta.to_empty(device="cpu")
    empty.load_state_dict({k: v.clone() for k, v in linear.state_dict().items()}, assign=True)
    same(empty, linear)
    assert not linear.weight.requires_grad and isinstance(linear, nn.Linear)


def test_new_values_are_quantised(tmp_path):
    linear, fresh = layer(), nn.Linear(67, 33, dtype=torch.bfloat16)
    at = linear.weight.data_ptr(), linear.weight_scale.data_ptr()
    want = put_fp8(copy.deepcopy(fresh))
    nn.Sequential(linear).load_state_dict(nn.Sequential(fresh).state_dict())
    same(linear, want)
    other = torch.randn(33, 67)
    fp4_ops.update(nn.Sequential(linear), "0.weight", other)
    assert torch.equal(linear.dequantize(), want_of(other)) and not linear.weight.requires_grad
    assert at == (linear.weight.data_ptr(), linear.weight_scale.data_ptr())
    for values, words in (
        (torch.randn(33, 67).double(), "are torch.float64; they must be float32"),
        (torch.full((33, 67), torch.nan), "hold NaN or infinity, which have no fp8 code"),
    ):
        with pytest.raises(ValueError, match=words):
            linear.overwrite(values)
        with pytest.raises(RuntimeError, match=words):
            linear.load_state_dict({"weight": values, "bias": fresh.bias})
    assert torch.equal(linear.dequantize(), want_of(other))


def want_of(weight: torch.Tensor) -> torch.Tensor:
    """Returns the values that a weight has in fp8."""
    codes, scale = quantize_rows(weight)
    return (codes.double() * scale[:, None].double()).float()


def test_hooks_and_references_stay():
    """accelerate replaces `forward` on the module and calls the one before."""
    accelerate = pytest.importorskip("accelerate")
    linear, seen = nn.Linear(8, 5), []
    linear.mark = seen
    linear.register_forward_hook(lambda *_: seen.append(1))
    accelerate.hooks.add_hook_to_module(linear, accelerate.hooks.ModelHook())
    made, x = put_fp8(linear), torch.randn(3, 8)
    assert made is linear and made.mark is seen and hasattr(made, "_hf_hook")
    with torch.no_grad():
        assert torch.allclose(made(x).double(), in_float64(made, x), atol=1e-4) and seen == [1]
    accelerate.hooks.remove_hook_from_module(made)
    with torch.no_grad():
        assert torch.allclose(made(x).double(), in_float64(made, x), atol=1e-4) and seen == [1, 1]


def test_a_shared_weight_stays_shared_in_copies():
    first = layer()
    model = nn.Sequential(first, put_fp8(nn.Linear(67, 33, dtype=torch.bfloat16), first))
    for made in (model, copy.deepcopy(model)):
        assert made[0].weight is made[1].weight and made[0].weight_scale is made[1].weight_scale
        assert sum(p.dtype == CODES for p in made.parameters()) == 1


@pytest.mark.parametrize("backend", ["inductor", "fp4"])
def test_inductors_cpp_wrapper(backend, fresh_dynamo):
    """Its code cannot pass lists to an operator: torch 2.13 ends with a segmentation fault."""
    linear, x = layer(k=64), torch.randn(2, 3, 64).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(linear, backend=backend, options={"cpp_wrapper": True})
        assert torch.equal(compiled(x), linear(x))


def test_export_and_aot_inductor(tmp_path):
    linear, x = layer(k=64), torch.randn(2, 3, 64).bfloat16()
    program = torch.export.export(linear, (x,))
    assert "fp4.fp8_linear" in str(program.graph)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(package)(x), linear(x))
