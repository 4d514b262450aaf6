"""FP4Tensor: what it computes, what it refuses, and that it survives compiling, saving and moving."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from reference import FP4_FORMATS, KERNEL_FORMATS, assert_close, dequantize

import fp4_ops
from fp4_ops import FP4Tensor

G, N, K = 3, 48, 64


@pytest.fixture(params=KERNEL_FORMATS)
def format(request) -> str:
    return request.param


@pytest.fixture(params=["plain", "tile16"])
def layout(request, device) -> str:
    if device == "cuda" and request.param == "tile16":
        pytest.skip("tile16 is a CPU layout")
    return request.param


def weight(format, *shape, device="cpu", layout="plain", dtype=torch.float32) -> FP4Tensor:
    return fp4_ops.quantize(torch.randn(*shape).to(dtype).to(device), format).prepack(layout)


def exact(w: FP4Tensor) -> torch.Tensor:
    w = w.prepack("plain")
    values = dequantize(w.packed, w.block_scale, w.global_scale, w.format)
    return values.mT if w.transposed else values


def test_quantize(format, device):
    x = torch.randn(G, N, K, device=device).bfloat16()
    w = fp4_ops.quantize(x, format)
    assert isinstance(w, FP4Tensor) and w.shape == x.shape and w.dtype == x.dtype and w.device == x.device
    assert w.stride() == x.stride()
    packed, block_scale, _ = torch.ops.fp4.quantize(x, format)
    assert torch.equal(w.packed, packed)
    assert torch.equal(w.block_scale.view(torch.uint8), block_scale.view(torch.uint8))
    assert (w.global_scale is None) == (format != "nvfp4")
    same = FP4Tensor(*torch.ops.fp4.quantize(x, format), format=format, dtype=x.dtype)
    assert (same.global_scale is None) == (format != "nvfp4") and torch.equal(
        same.dequantize(), w.dequantize()
    )
    assert w.nbytes == x.numel() // 2 + block_scale.nbytes + (4 * G if format == "nvfp4" else 0)
    assert repr(w) == f"FP4Tensor({format}, [3, 48, 64], bfloat16, {x.device})"


@pytest.mark.parametrize("rows", [(2, 5), (1, 5), (2, 3, 5)])
def test_rows_that_are_a_slice(format, layout, device, rows):
    """`lm_head(hidden_states[:, -1:])`: torch.matmul repeats the weight for such rows."""
    w = weight(format, N, K, device=device, layout=layout)
    x = torch.randn(*rows, K, device=device)[..., -2:, :]
    bias = torch.randn(N, device=device)
    want = x.cpu().double() @ exact(w).cpu().double().mT
    assert_close((x @ w.mT).cpu(), want, torch.float32, K)
    assert_close(F.linear(x, w, bias).cpu(), want + bias.cpu().double(), torch.float32, K)


def test_quantize_with_a_global_scale():
    x, scale = torch.randn(G, N, K), torch.rand(G)
    assert torch.equal(fp4_ops.quantize(x, "nvfp4", global_scale=scale).global_scale, scale)
    with pytest.raises(RuntimeError, match="global_scale was given; format mxfp4 has no global scale"):
        fp4_ops.quantize(x, "mxfp4", global_scale=scale)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dequantize(format, layout, dtype, device):
    w = weight(format, G, N, K, device=device, layout=layout, dtype=torch.float16)
    values = w.dequantize(dtype)
    assert type(values) is torch.Tensor and values.dtype == (dtype or torch.float16)
    want = exact(w)
    assert torch.equal(values, want if dtype == torch.float64 else want.float().to(values.dtype))
    assert torch.equal(w.mT.dequantize(dtype), values.mT)


def test_layouts_are_undone(format):
    w = weight(format, G, N, K)
    tiled = w.prepack("tile16")
    assert tiled.weight_layout == "tile16" and not torch.equal(tiled.packed, w.packed)
    assert torch.equal(tiled.prepack("plain").packed, w.packed)
    with pytest.raises(
        RuntimeError, match="layout is 'tile8'; it must be one of: mma_bf16, mma_bf16_invariant, plain, "
    ):
        w.prepack("tile8")


@pytest.mark.parametrize("format", FP4_FORMATS)
def test_a_layout_that_pads_k(format):
    """sm90 holds more columns than the tensor has: its shape and values stay, and so does the way back."""
    w = weight(format, 2, 64, 80)
    packed = w.prepack("sm90")
    assert packed.packed.shape == (2, 64, 64) and packed.global_scale.shape == (2,)
    assert packed.shape == w.shape and packed.mT.shape == w.mT.shape
    assert torch.equal(packed.dequantize(torch.float64), w.dequantize(torch.float64))
    assert torch.equal(packed[1].mT.dequantize(), w[1].mT.dequantize())
    back = packed.prepack("tile16").prepack("plain")
    assert back.packed.shape == w.packed.shape and (back.global_scale is None) == (format == "mxfp4")
    assert torch.equal(back.dequantize(torch.float64), w.dequantize(torch.float64))
    torch.testing.assert_close(packed.clone().dequantize(), w.dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(format, layout, dtype, device):
    w2, w3 = (weight(format, *s, device=device, layout=layout) for s in ((N, K), (G, N, K)))
    a = torch.randn(2, 5, K, device=device).to(dtype)
    bias = torch.randn(N, device=device).to(dtype)
    a64, e2, e3 = a.double(), exact(w2), exact(w3)
    rows = a[0]
    assert_close(rows @ w2.t(), a64[0] @ e2.t(), dtype, K)
    assert_close(a @ w2.t(), a64 @ e2.t(), dtype, K)
    assert_close(torch.mm(rows, w2.transpose(0, 1)), a64[0] @ e2.t(), dtype, K)
    assert_close(F.linear(a, w2), a64 @ e2.t(), dtype, K)
    assert_close(F.linear(rows, w2, bias), a64[0] @ e2.t() + bias.double(), dtype, K)
    assert_close(F.linear(rows, w3[1]), a64[0] @ e3[1].t(), dtype, K)
    grouped = torch.randn(G, 4, K, device=device).to(dtype)
    assert_close(torch.bmm(grouped, w3.mT), grouped.double() @ e3.mT, dtype, K)
    assert_close(grouped @ w3.mT, grouped.double() @ e3.mT, dtype, K)
    with torch.inference_mode():
        assert_close(F.linear(rows, w2, bias), a64[0] @ e2.t() + bias.double(), dtype, K)


def test_grouped_mm(format, device):
    w = weight(format, G, N, K, device=device, dtype=torch.bfloat16)
    a = torch.randn(7, K, device=device).bfloat16()
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=device)
    out = F.grouped_mm(a, w.mT, offs=offs)
    want = torch.cat((a[:2].double() @ exact(w)[0].t(), a[2:].double() @ exact(w)[2].t()))
    assert_close(out, want, torch.bfloat16, K)


SPELLINGS = {
    "t": lambda w, w3, x, x3: torch.mm(x, w.t()),
    "mT": lambda w, w3, x, x3: x @ w.mT,
    "T": lambda w, w3, x, x3: x @ w.T,
    "permute": lambda w, w3, x, x3: torch.bmm(x3, w3.permute(0, 2, 1)),
    "transpose": lambda w, w3, x, x3: x @ w.transpose(-2, -1),
    "swapaxes": lambda w, w3, x, x3: torch.addmm(torch.ones(N), x, w.swapaxes(0, 1)),
    "adjoint": lambda w, w3, x, x3: x @ w.adjoint(),
    "three dimensions": lambda w, w3, x, x3: x3 @ w.t(),
    "one row": lambda w, w3, x, x3: x[0] @ w.t(),
    "bmm": lambda w, w3, x, x3: torch.bmm(x3, w3.mT),
    "select": lambda w, w3, x, x3: F.linear(x, w3[1]),
    "expand": lambda w, w3, x, x3: torch.bmm(x3, w.t().expand(G, K, N)),
    "reshape": lambda w, w3, x, x3: F.linear(x, w.reshape(N, -1)),
    "to": lambda w, w3, x, x3: F.linear(x.bfloat16(), w.to(torch.bfloat16)).float(),
    "cpu": lambda w, w3, x, x3: F.linear(x, w.cpu()),
    "detach": lambda w, w3, x, x3: F.linear(x, w.detach()),
    "data": lambda w, w3, x, x3: F.linear(x, w.data),
    "parameter": lambda w, w3, x, x3: F.linear(x, torch.nn.Parameter(w, requires_grad=False)),
    "dequantize": lambda w, w3, x, x3: x @ w.t().dequantize(),
    "copy": lambda w, w3, x, x3: F.linear(x, w.clone().copy_(w3[1])),
}


@pytest.mark.parametrize("made", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_without_gradients_as_with_them(spelling, mode, made):
    """In inference mode torch asks a subclass before it writes `w.mT` as `w.transpose`."""
    w, w3, x, x3 = weight("nvfp4", N, K), weight("nvfp4", G, N, K), torch.randn(5, K), torch.randn(G, 5, K)
    want = SPELLINGS[spelling](w, w3, x, x3)
    with made():
        w, w3 = w.clone(), w3.clone()
    assert w.is_inference() == (made is torch.inference_mode)
    with mode():
        assert torch.equal(SPELLINGS[spelling](w, w3, x, x3), want)


def test_a_view_in_inference_mode_is_of_its_base():
    w = weight("nvfp4", N, K)
    with torch.inference_mode():
        view = w.t()
    assert not view.is_inference() and not view.packed.is_inference() and view._version == w._version
    w.copy_(torch.randn(N, K))
    assert torch.equal(view.dequantize(), w.dequantize().t())


def test_everything_else_is_refused_by_name():
    w = weight("nvfp4", N, K)
    x = torch.randn(N, K)
    for call, name in (
        (lambda: w + 1, "aten.add.Tensor"),
        (lambda: w.relu(), "aten.relu.default"),
        (lambda: torch.cat((w, w)), "aten.cat.default"),
        (lambda: w.reshape(-1), "aten"),
        (lambda: w.sum(), "aten.sum.default"),
        (lambda: torch.mm(w, x.t()), "aten.mm.default"),
        (lambda: x.t() @ w, "aten.mm.default"),
        (lambda: w.transpose(0, 1).to(torch.int8), "aten._to_copy.default"),
        (lambda: weight("nvfp4", G, N, K).transpose(0, 1), "aten.transpose.int"),
        (lambda: weight("nvfp4", G, N, K).permute(1, 0, 2), "aten.permute.default"),
        (lambda: w[0], "aten.select.int"),
        (lambda: w.copy_(x[:2]), "aten.copy_.default"),
        (lambda: x.copy_(w), "aten.copy_.default"),
        (lambda: w.copy_(weight("mxfp4", N, K)), "aten.copy_.default"),
        (lambda: torch.addmm(x[:, :1].t(), x, w.t(), alpha=2), "aten.addmm.default"),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name}.* on an FP4Tensor: .*dequantize\(\)"):
            call()


def test_a_gradient_is_an_error(format):
    w = weight(format, N, K)
    x = torch.randn(4, K, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients would sum over the other one and do not exist"):
        F.linear(x, w).sum().backward()
    with pytest.raises(RuntimeError, match=r"FP4Tensor.dequantize has no gradient"):
        w.requires_grad_().dequantize()


def test_moving_and_copying(format, layout):
    w = weight(format, G, N, K, layout=layout)
    for other in (w.clone(), w.detach(), copy.deepcopy(w), w.to(torch.bfloat16), w.bfloat16().float()):
        assert isinstance(other, FP4Tensor) and other.weight_layout == layout
        assert torch.equal(other.packed, w.packed)
    assert w.to(torch.bfloat16).dtype == torch.bfloat16
    assert w.clone().packed.data_ptr() != w.packed.data_ptr()
    assert w.detach().packed.data_ptr() == w.packed.data_ptr()
    meta = w.to("meta")
    assert meta.device.type == "meta" and meta.packed.device.type == "meta" and meta.weight_layout == "plain"
    other = weight(format, G, N, K)
    w.copy_(other)
    assert w.weight_layout == layout and torch.equal(w.dequantize(), other.dequantize())


@pytest.mark.gpu
def test_moving_to_a_gpu_and_back(format):
    w = weight(format, G, N, K, layout="tile16")
    moved = w.cuda()
    assert moved.device.type == "cuda" and moved.weight_layout == "plain"
    assert torch.equal(moved.dequantize().cpu(), w.dequantize())
    assert torch.equal(moved.cpu().packed, w.prepack("plain").packed)


def test_save_and_load(format, layout):
    w = weight(format, G, N, K, layout=layout, dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save({"w": w, "t": w.mT}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name, want in (("w", w), ("t", w.mT)):
        got = loaded[name]
        assert isinstance(got, FP4Tensor) and got.shape == want.shape and got.dtype == want.dtype
        assert (got.format, got.weight_layout, got.transposed) == (
            want.format,
            want.weight_layout,
            want.transposed,
        )
        assert torch.equal(got.dequantize(), want.dequantize())


class Module(torch.nn.Module):
    def __init__(self, format):
        super().__init__()
        self.linear = torch.nn.Linear(K, N)
        self.experts = torch.nn.Parameter(weight(format, G, 2 * N, N), requires_grad=False)
        self.linear.weight = torch.nn.Parameter(weight(format, N, K), requires_grad=False)

    def forward(self, x, offs):
        return F.grouped_mm(self.linear(x).bfloat16(), self.experts.mT, offs=offs)


def test_as_parameters(format):
    module, other = Module(format), Module(format)
    assert isinstance(module.linear.weight, torch.nn.Parameter)
    other.load_state_dict(module.state_dict())
    x, offs = torch.randn(7, K), torch.tensor([2, 3, 7], dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(module(x, offs), other(x, offs))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(format, layout, dynamic, device):
    def function(x, w2, w3, offs, bias):
        h = F.linear(x, w2, bias).relu()
        return F.grouped_mm(h, w3.mT, offs=offs), x @ w2.t(), w2.dequantize()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    w2 = weight(format, N, K, device=device, layout=layout, dtype=torch.bfloat16)
    w3 = weight(format, G, K, N, device=device, layout=layout, dtype=torch.bfloat16)
    bias = torch.randn(N, device=device).bfloat16()
    for tokens in (7, 9):
        x = torch.randn(tokens, K, device=device).bfloat16()
        offs = torch.tensor([2, 3, tokens], dtype=torch.int32, device=device)
        for got, want in zip(compiled(x, w2, w3, offs, bias), function(x, w2, w3, offs, bias)):
            assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.one_in(len(KERNEL_FORMATS))  # Inductor sees the same operators, whatever they read
def test_compile_a_module_with_inductor(format):
    torch._dynamo.reset()
    module = Module(format)
    compiled = torch.compile(module, fullgraph=True)
    x, offs = torch.randn(7, K), torch.tensor([2, 3, 7], dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, offs), module(x, offs))


def test_a_compiled_function_may_quantize(format):
    def function(x):
        w = fp4_ops.quantize(x, format)
        return w, F.linear(x, w)

    torch._dynamo.reset()
    x = torch.randn(N, K)
    w, out = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    want_w, want = function(x)
    assert isinstance(w, FP4Tensor) and torch.equal(w.packed, want_w.packed)
    assert torch.equal(out, want)


def test_export_keeps_the_operators(format):
    module = Module(format)
    x, offs = torch.randn(7, K), torch.tensor([2, 3, 7], dtype=torch.int32)
    with torch.no_grad():
        program = torch.export.export(module, (x, offs)).run_decompositions()
        targets = {node.target for node in program.graph.nodes}
        assert {torch.ops.fp4.mm.default, torch.ops.fp4.grouped_mm.default} <= targets
        assert torch.equal(program.module()(x, offs), module(x, offs))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_inner_tensors_are_those_that_flatten_names(format):
    w = torch.nn.Parameter(fp4_ops.quantize(torch.randn(32, 64), format), requires_grad=False)
    names, _ = w.__tensor_flatten__()
    inner = w.inner_tensors()
    assert len(inner) == len(names) and all(getattr(w, n) is t for n, t in zip(names, inner))
