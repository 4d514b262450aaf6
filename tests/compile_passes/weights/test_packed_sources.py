"""Models with experts that are already in 4 bits: the rewrite uses their codes and scales unchanged.

Codes and scales are random, not those that quantising would choose, so quantising anew would be seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Block, Recorder, relative_error
from moe_styles import STYLES, FusedStyle, StackedStyle
from torch import Tensor, nn

import fp4_ops
from fp4_ops import FP4Tensor
from fp4_ops.compile_passes.weights import packed as packed_weights
from fp4_ops.compile_passes.weights.packed import leaves_of, memory_of
from fp4_ops.compile_passes.weights.specs import Assembly, Piece, StoredSpec, prequantized

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FORMATS = ["nvfp4", "mxfp4"]
SIZES = {"experts": 3, "hidden": 64, "inter": 96}


def random_parts(*shape: int, format: str = "nvfp4") -> tuple[Tensor, Tensor, Tensor | None]:
    """Arbitrary codes and scales of a weight [..., n, k] of about unit variance."""
    *lead, n, k = shape
    packed = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    if format == "mxfp4":
        scale = torch.randint(122, 126, (*lead, n, -(-k // 32)), dtype=torch.uint8)
        return packed, scale.view(torch.float8_e8m0fnu), None
    if format == "int4_g32":
        return packed, torch.rand(*lead, n, -(-k // 32)) * 0.2 + 0.05, None
    scale = (torch.rand(*lead, n, -(-k // 16)) * 3 + 0.2).to(torch.float8_e4m3fn)
    return packed, scale, 2.0 ** torch.randint(-6, -2, tuple(lead))


def fp4_tensor(*shape: int, format: str = "nvfp4", dtype: torch.dtype = torch.float32) -> FP4Tensor:
    return FP4Tensor(*random_parts(*shape, format=format), format=format, dtype=dtype)


def nvfp4_tensor(*shape: int, swizzled: bool = False, scaled: bool = True) -> Tensor:
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    packed, scale, global_scale = random_parts(*shape)
    if swizzled:
        from torchao.prototype.mx_formats.utils import hp_data_dims_to_swizzled_scale_dims_nvfp4, to_blocked

        scale = to_blocked(scale).view(*hp_data_dims_to_swizzled_scale_dims_nvfp4(*shape))
    return module.NVFP4Tensor(
        packed, scale, 16, torch.float32, global_scale if scaled else None, None, swizzled
    )


def mx_tensor(*shape: int) -> Tensor:
    """torchao computes with such weights only if activations are quantised, too."""
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    packed, scale, _ = random_parts(*shape, format="mxfp4")
    e2m1 = torch.float4_e2m1fn_x2
    how = module.QuantizeTensorToMXKwargs(elem_dtype=e2m1)
    return module.MXTensor(packed, scale, e2m1, 32, torch.float32, how.kernel_preference, how, False)


TENSORS: dict[str, Callable[..., Tensor]] = {
    "FP4Tensor, nvfp4": fp4_tensor,
    "FP4Tensor, mxfp4": lambda *shape: fp4_tensor(*shape, format="mxfp4"),
    "FP4Tensor, int4_g32": lambda *shape: fp4_tensor(*shape, format="int4_g32"),
    "FP4Tensor, tile16": lambda *shape: fp4_tensor(*shape).prepack("tile16"),
    "NVFP4Tensor": nvfp4_tensor,
    "NVFP4Tensor, swizzled": lambda *shape: nvfp4_tensor(*shape, swizzled=True),
    "NVFP4Tensor, one scale": lambda *shape: nvfp4_tensor(*shape, scaled=False),
    "MXTensor": mx_tensor,
}


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def hold(module: nn.Module, make: Callable[..., Tensor]) -> nn.Module:
    """Every linear layer but the router over a weight that `make` gives."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and "router" not in name:
            layer.weight = parameter(make(*layer.weight.shape))
    return module


def decoded(module: nn.Module) -> nn.Module:
    """The same module over the values that the codes stand for."""
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            if type(p.data) is not Tensor:
                setattr(layer, name, parameter(p.dequantize(p.dtype).detach()))
    return twin


def check(module: nn.Module, twin: nn.Module, ops: list[str], one_token: bool = False) -> Recorder:
    """Prefill, another length under the same compilation; and one token, which is compiled anew: whatever the
    source of the weights is, so once for each way in which they enter the graph."""
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5, 1) if one_token else (9, 5):
            x = torch.randn(n, 64)
            assert relative_error(compiled(x), twin(x)) < 5e-6, recorder.reasons
    assert recorder.ops == ops * (2 if one_token else 1), recorder.reasons
    return recorder


# --- tensor subclasses ---


OF_LINEAR_LAYERS = ["FP4Tensor, tile16", "NVFP4Tensor, one scale"]
"""Linear layers of these show enough."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("where loop", kind) for kind in TENSORS if kind not in OF_LINEAR_LAYERS]
    + [more("where loop", kind) for kind in OF_LINEAR_LAYERS]
    + [more("dense stack", kind) for kind in ("FP4Tensor, nvfp4", "NVFP4Tensor")],
)
def test_loops_over_linear_layers(name, kind):
    """Codes and scales are the model's. Gate and up have global scales of their own, and one operator over
    both loses neither."""
    module = hold(STYLES[name](**SIZES), TENSORS[kind])
    one_token = kind == "FP4Tensor, nvfp4"
    site = check(module, decoded(module), ["fp4::moe"], one_token).sites[0]
    assert site.layout == "tile16" and site.bytes_before == site.bytes_after
    assert len(site.weights) >= 3 * module.E
    if name == "dense stack" or kind == "NVFP4Tensor, swizzled":
        return
    ((_, operands),) = packed_from(module.list[0].w2.weight)
    packed, scale, _ = torch.ops.fp4.unpack(*(*operands, None)[:3], site.format, "tile16")
    for e, expert in enumerate(module.list):
        w = expert.w2.weight
        w = w.prepack("plain") if isinstance(w, FP4Tensor) else w
        codes, scales = (w.packed, w.block_scale) if isinstance(w, FP4Tensor) else (w.qdata, w.scale)
        assert torch.equal(packed[e], codes)
        assert torch.equal(scale[e].view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "format"),
    [
        more("dense bmm", "nvfp4"),
        ("dense bmm, scaled inputs (Llama 4)", "mxfp4"),
        ("token mask loop", "nvfp4"),
        more("token mask loop", "mxfp4"),
    ],
)
def test_stacked_experts(name, format):
    module = STYLES[name](**SIZES)
    assert isinstance(module, FusedStyle)
    module.w13 = parameter(fp4_tensor(3, 192, 64, format=format).mT)
    module.w2 = parameter(fp4_tensor(3, 64, 96, format=format).mT)
    check(module, decoded(module), ["fp4::moe"], one_token=format == "nvfp4")


@pytest.mark.parametrize("format", FORMATS)
def test_sorted_rows(format):
    """aten._grouped_mm takes bfloat16; the weights here are exact in it."""
    module = Block("grouped_mm", dtype=torch.bfloat16)
    module.w13 = parameter(fp4_tensor(6, 96, 32, format=format, dtype=torch.bfloat16))
    module.w2 = parameter(fp4_tensor(6, 32, 48, format=format, dtype=torch.bfloat16))
    twin, recorder = decoded(module), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, 32, dtype=torch.bfloat16)
            # Four roundings to bfloat16, each 2^-9 at most; other codes or scales would be off by far more.
            assert relative_error(compiled(x), twin(x)) < 2e-2
    assert recorder.ops == ["fp4::moe"]


@pytest.mark.parametrize("kind", TENSORS)
def test_linear_layers(kind):
    """They are in 4 bits already, so no option need ask for it."""
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.SiLU(), nn.Linear(96, 64))
    model = hold(model, TENSORS[kind])
    check(model, decoded(model), ["fp4::mm"] * 2, one_token=kind == "FP4Tensor, nvfp4")


def packed_from(weight: Tensor) -> list[tuple[tuple[int, ...], tuple[Tensor, ...]]]:
    """What was made of a weight and others: (ids of all of them, operands). An id may be that of a tensor of
    an earlier test, whose memory is still there."""
    entries = [item for s in packed_weights._stores.values() for item in s._entries.items()]
    mine = {memory_of(leaf) for leaf in leaves_of([weight])}
    return [(key, e.packed) for key, e in entries if id(weight) in key and not e.stores.isdisjoint(mine)]


@pytest.mark.parametrize("layout, shared", [("tile16", True), ("plain", False)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_in_the_kernels_layout_is_not_held_twice(layout, shared, transposed):
    """Its operands are its own memory, which is also written to and replaced."""

    def weight() -> FP4Tensor:
        w = fp4_tensor(96, 64).prepack(layout)
        return w.mT if transposed else w

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter(weight())

        def forward(self, x):
            return x @ (self.weight if transposed else self.weight.mT)

    module, recorder = Product(), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder)
    x = torch.randn(5, 64)

    def agrees() -> bool:
        want = decoded(module)(x)
        return relative_error(compiled(x), want) < 5e-6

    with torch.no_grad():
        assert agrees() and recorder.ops == ["fp4::mm"]
        ((_, operands),) = packed_from(module.weight)
        mine = {memory_of(leaf) for leaf in leaves_of([module.weight])}
        assert [memory_of(t) in mine for t in operands] == [shared] * 3
        module.weight.copy_(weight())
        assert agrees()
        module.weight.packed.data.bitwise_xor_(8)
        assert agrees()
        module.weight = parameter(weight())
        assert agrees()


@pytest.mark.parametrize("lead", [(), (3,)], ids=["linear", "experts"])
@pytest.mark.parametrize("layout", ["plain", "tile16", "mma_bf16", "sm90"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_a_weight_holds_is_what_packing_makes(format, layout, lead):
    weight = fp4_tensor(*lead, 128, 192, format=format)
    at = [*((("at", e),) for e in range(3))] if lead else [()]
    pieces = tuple((Piece(0, (*place, ("n", 0, 1), ("k", 0, 1))),) for place in at)

    def operands(w: FP4Tensor) -> tuple[Tensor, ...]:
        way = prequantized(w)
        assert way is not None
        return StoredSpec(format, layout, Assembly(pieces, 128, 192), (way,)).pack(w)

    own = weight.prepack(layout)
    shared, made = operands(own), operands(weight.prepack("mma_bf16" if layout == "sm90" else "sm90"))
    stores = {memory_of(leaf) for leaf in leaves_of([own])}
    for t, new in zip(shared, made, strict=True):
        assert memory_of(t) in stores and memory_of(new) not in stores
        assert t.dtype == new.dtype and torch.equal(t.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize("layout, shared", [("tile16", True), ("plain", False)])
def test_experts_in_the_kernels_layout_are_not_held_twice(layout, shared):
    module = STYLES["dense bmm"](**SIZES)
    module.w13 = parameter(fp4_tensor(3, 192, 64).prepack(layout).mT)
    module.w2 = parameter(fp4_tensor(3, 64, 96).prepack(layout).mT)
    check(module, decoded(module), ["fp4::moe"])
    for weight in (module.w13, module.w2):
        ((_, operands),) = packed_from(weight)
        mine = {memory_of(leaf) for leaf in leaves_of([weight])}
        assert [memory_of(t) in mine for t in operands] == [shared] * 3


def test_a_new_value_is_noticed():
    module = hold(STYLES["where loop"](**SIZES), fp4_tensor)
    compiled = torch.compile(module, backend=Recorder(activation="bf16"), dynamic=True, fullgraph=True)
    x = torch.randn(7, 64)
    with torch.no_grad():
        compiled(x)
        module.list[2].w1.weight.copy_(fp4_tensor(96, 64))
        assert relative_error(compiled(x), decoded(module)(x)) < 5e-6


@pytest.mark.parametrize("make", [fp4_tensor, nvfp4_tensor], ids=["FP4Tensor", "NVFP4Tensor"])
def test_a_write_to_what_a_tensor_holds_is_noticed(make):
    """To its codes, past its own version and theirs."""
    module = hold(STYLES["where loop"](**SIZES), make)
    compiled = torch.compile(module, backend=Recorder(activation="bf16"), dynamic=True, fullgraph=True)
    x = torch.randn(7, 64)
    with torch.no_grad():
        for _ in range(3):
            assert relative_error(compiled(x), decoded(module)(x)) < 5e-6
            codes = next(t for t in leaves_of([module.list[2].w1.weight]) if t.dtype == torch.uint8)
            codes.data.bitwise_xor_(8)


def test_a_gate_of_zeros():
    """Its global scale may be 0, by which up's cannot be divided."""
    module = hold(STYLES["where loop"](**SIZES), fp4_tensor)
    module.list[1].w1.weight.global_scale.zero_()
    check(module, decoded(module), ["fp4::moe"])


# --- what must not become one block ---


def told(module: nn.Module) -> str:
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, 64)
            assert relative_error(compiled(x), decoded(module)(x)) < 5e-6
    (frame,) = recorder.frames
    assert not [s for s in frame.sites if s.op in ("fp4::moe", "fp4::indexed_mm")]
    return str(frame)


def test_scales_of_their_own_and_another_activation():
    module = hold(STYLES["where loop"](act=F.relu, **SIZES), fp4_tensor)
    assert "is not linear in up" in told(module)


def test_experts_of_different_formats():
    module = hold(STYLES["where loop"](**SIZES), fp4_tensor)
    module.list[1].w1.weight = parameter(fp4_tensor(96, 64, format="mxfp4"))
    assert "in different formats (mxfp4, nvfp4)" in told(module)


def test_experts_some_of_which_are_not_in_4_bits():
    module = hold(STYLES["where loop"](**SIZES), nvfp4_tensor)
    module.list[1].w1 = nn.Linear(64, 96, bias=False)
    assert "some of the experts' weights are held in 4 bits" in told(module)


def test_one_expert_twice():
    class Twice(STYLES["where loop"]):
        def experts_of(self, x, ids, weights):
            token, slot = torch.where(ids == 2)
            again = self.list[2](x[token]) * weights[token, slot, None]
            return super().experts_of(x, ids, weights).index_add(0, token, again)

    assert "is added 2 times" in told(hold(Twice(**SIZES), fp4_tensor))


def test_a_use_that_is_no_product_leaves_the_graph_alone():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = parameter(fp4_tensor(64, 64)), parameter(fp4_tensor(64, 64))

        def forward(self, x):
            return F.linear(x, self.w), self.v.t()

    recorder, module, x = Recorder(activation="bf16"), Odd(), torch.randn(5, 64)
    with torch.no_grad():
        got = torch.compile(module, backend=recorder, fullgraph=True)(x)
        assert torch.equal(got[0], module(x)[0]) and isinstance(got[1], FP4Tensor)
    assert "a product of v (FP4Tensor) was not found" in recorder.frames[0].note


def test_what_becomes_of_torchaos_own_quantisation_of_activations_is_said():
    module = hold(nn.Sequential(nn.Linear(64, 64, bias=False)), mx_tensor)
    report = fp4_ops.explain(module, torch.randn(4, 64))
    assert "act_quant_kwargs give way to the option `activation`" in str(report)


def test_other_tensors_of_torchao_are_refused_by_name():
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    how = mx.QuantizeTensorToMXKwargs(elem_dtype=torch.float8_e4m3fn)
    eight = mx.MXTensor.to_mx(torch.randn(64, 64), torch.float8_e4m3fn, 32, act_quant_kwargs=how)
    module = hold(nn.Sequential(nn.Linear(64, 64, bias=False)), lambda *_: eight)
    report = fp4_ops.explain(module, torch.randn(4, 64))
    assert "an MXTensor of float8_e4m3fn, not of 4 bits" in str(report)


# --- fp4.dequantize in the graph ---


def packed(style: type, format: str) -> nn.Module:
    """A style whose w13 [E, 2I, H] and w2 [E, H, I] are packed buffers."""

    class Packed(style):
        def build(self):
            shapes = {"w13": (self.E, 2 * self.I, self.H), "w2": (self.E, self.H, self.I)}
            for name, shape in shapes.items():
                for part, tensor in zip(("", "_scale", "_global"), random_parts(*shape, format=format)):
                    self.register_buffer(f"packed_{name}{part}", tensor)

        def weight(self, name: str) -> Tensor:
            parts = [getattr(self, f"packed_{name}{part}") for part in ("", "_scale", "_global")]
            return torch.ops.fp4.dequantize(*parts, format, torch.float32).transpose(1, 2)

        def experts_of(self, x, ids, weights):
            self.w13, self.w2 = self.weight("w13"), self.weight("w2")
            out = super().experts_of(x, ids, weights)
            del self.w13, self.w2
            return out

    return Packed(**SIZES)


FUSED = ["token mask loop", "gather + bmm", "dense bmm", "permute, unpermute (Megatron)"]


# --- decoding written out in the graph ---


def e2m1() -> Tensor:
    """Written out, for Dynamo takes the floats of a global list for variables when dynamic=True."""
    return torch.tensor(
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    )


def stacked_lookup(codes: Tensor) -> Tensor:
    table = e2m1()
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)


def shifted_lookup(codes: Tensor) -> Tensor:
    nibbles = (codes.unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8)) & 0xF
    return e2m1()[nibbles.int()].reshape(*codes.shape[:-1], -1)


def halved_integers(codes: Tensor) -> Tensor:
    table = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
    both = torch.stack((codes % 16, codes // 16), dim=-1)
    return table[both.long()].float().view(*codes.shape[:-1], -1) * 0.5


def pairs(codes: Tensor) -> Tensor:
    byte = torch.arange(256)
    table = torch.stack([e2m1()[byte & 15], e2m1()[byte >> 4]], -1)
    return table[codes.long()].flatten(-2)


def bit_arithmetic(codes: Tensor) -> Tensor:
    def one(c: Tensor) -> Tensor:
        sign, exponent, mantissa = (c >> 3) & 1, (c >> 1) & 3, c & 1
        small, large = mantissa * 0.5, (1 + mantissa * 0.5) * torch.exp2(exponent.float() - 1)
        return torch.where(exponent == 0, small, large) * (1.0 - 2.0 * sign)

    codes = codes.to(torch.int32)
    return torch.stack([one(codes & 15), one(codes >> 4)], -1).flatten(-2)


def every_other(codes: Tensor) -> Tensor:
    """transformers' convert_moe_packed_tensors."""
    table = e2m1()
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2)
    out[..., 0::2] = table[(codes & 0x0F).to(torch.int)]
    out[..., 1::2] = table[(codes >> 4).to(torch.int)]
    return out


def nvfp4_blocks(values: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    blocks = values.unflatten(-1, (-1, 16)) * scale.float().unsqueeze(-1)
    return blocks.flatten(-2) * global_scale.view(-1, 1, 1)


def nvfp4_repeated(values: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return values * (scale.float() * global_scale[:, None, None]).repeat_interleave(16, dim=-1)


def nvfp4_divided(values: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """compressed-tensors holds the reciprocal."""
    factor = (scale.to(torch.float32) / global_scale.reciprocal()[:, None, None]).unsqueeze(-1)
    return (values.view(*scale.shape, 16) * factor).view(values.shape)


def mxfp4_exponents(values: Tensor, scale: Tensor, _: None) -> Tensor:
    exponent = scale.view(torch.uint8).to(torch.int32) - 127
    return torch.ldexp(values.unflatten(-1, (-1, 32)), exponent.unsqueeze(-1)).flatten(-2)


def mxfp4_casts(values: Tensor, scale: Tensor, _: None) -> Tensor:
    return values * scale.to(torch.float32).repeat_interleave(32, -1)


CODES = [stacked_lookup, halved_integers, pairs, bit_arithmetic, every_other]
WRITTEN = [("nvfp4", c, nvfp4_blocks) for c in CODES]
WRITTEN += [("nvfp4", stacked_lookup, nvfp4_divided), ("mxfp4", stacked_lookup, mxfp4_exponents)]
WRITTEN += [more("nvfp4", shifted_lookup, nvfp4_blocks), more("nvfp4", stacked_lookup, nvfp4_repeated)]
WRITTEN += [more("mxfp4", stacked_lookup, mxfp4_casts)]  # also in a buffer's table, below


def written(style: type, format: str, codes: Callable, scales: Callable) -> nn.Module:
    """`packed`, whose forward decodes by itself."""
    base = type(packed(style, format))

    class Written(base):
        def weight(self, name: str) -> Tensor:
            parts = [getattr(self, f"packed_{name}{part}") for part in ("", "_scale", "_global")]
            return scales(codes(parts[0]), *parts[1:]).transpose(1, 2)

    return Written(**SIZES)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("error:An output with one or more elements was resized")
@pytest.mark.parametrize(("format", "codes", "scales"), WRITTEN)
def test_decoding_written_out(format, codes, scales):
    module = written(STYLES["token mask loop"], format, codes, scales)
    site = check(module, module, ["fp4::moe"]).sites[0]
    assert (site.format, site.layout) == (format, "tile16")
    ((_, operands),) = packed_from(module.packed_w2)
    got = torch.ops.fp4.unpack(*(*operands, None)[:3], format, "tile16")
    assert torch.equal(got[0], module.packed_w2)
    assert torch.equal(got[1].view(torch.uint8), module.packed_w2_scale.view(torch.uint8))


@pytest.mark.parametrize("name", ["gather + bmm", *(more(n) for n in FUSED if n != "gather + bmm")])
def test_decoding_written_out_in_other_forms(name):
    module = written(STYLES[name], "mxfp4", shifted_lookup, mxfp4_exponents)
    check(module, module, ["fp4::moe"], one_token=True)


def high_nibble_first(codes: Tensor) -> Tensor:
    table = e2m1()
    return torch.stack([table[(codes >> 4).long()], table[(codes & 15).long()]], -1).flatten(-2)


def another_table(codes: Tensor) -> Tensor:
    table = e2m1().clamp(max=5.0)
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)


def halves(codes: Tensor) -> Tensor:
    """All low nibbles, then all high ones."""
    table = e2m1()
    return torch.cat([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)


def neighbours(codes: Tensor) -> Tensor:
    return stacked_lookup(codes.roll(1, -1))


def scales_of_other_rows(values: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return nvfp4_blocks(values, scale.flip(1), global_scale)


def scales_as_integers(values: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return nvfp4_blocks(values, scale.view(torch.uint8).float() / 256, global_scale)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("codes", "scales"),
    [(c, nvfp4_blocks) for c in (high_nibble_first, another_table)]
    + [more(c, nvfp4_blocks) for c in (halves, neighbours)]
    + [(stacked_lookup, s) for s in (scales_of_other_rows, scales_as_integers)],
)
def test_decodings_that_are_another(codes, scales):
    """Not in 4 bits as the operators have them: quantising anew would change the model."""
    module, recorder = written(STYLES["token mask loop"], "nvfp4", codes, scales), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, 64)
            assert relative_error(compiled(x), module(x)) < 5e-6
    assert not recorder.ops


def test_a_table_in_a_buffer_is_watched():
    class Table(type(written(STYLES["gather + bmm"], "mxfp4", stacked_lookup, mxfp4_casts))):
        def build(self):
            super().build()
            self.register_buffer("table", e2m1())

        def weight(self, name: str) -> Tensor:
            codes, scale = getattr(self, f"packed_{name}"), getattr(self, f"packed_{name}_scale")
            nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
            return mxfp4_casts(self.table[nibbles.long()], scale, None).transpose(1, 2)

    module, x = Table(**SIZES), torch.randn(5, 64)
    check(module, module, ["fp4::moe"])
    compiled = torch.compile(module, backend=Recorder(activation="bf16"), dynamic=True, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        module.table[3] = 1.25
        with pytest.raises(
            RuntimeError, match="a table from which the model decodes its weights has changed"
        ):
            compiled(x)


DEQUANTISED = [("token mask loop", "mxfp4"), ("gather + bmm", "mxfp4"), ("dense bmm", "nvfp4")]
DEQUANTISED += [more("token mask loop", "nvfp4"), more("permute, unpermute (Megatron)", "mxfp4")]


@pytest.mark.parametrize(("name", "format"), DEQUANTISED)
def test_dequantised_experts(name, format):
    assert issubclass(STYLES[name], FusedStyle) and not issubclass(STYLES[name], StackedStyle)
    module = packed(STYLES[name], format)
    recorder = check(module, module, ["fp4::moe"], one_token=format == "nvfp4")
    site = recorder.sites[0]
    assert (site.format, site.layout, site.weights[0]) == (format, "tile16", "packed_w13")
    targets = {str(n.target) for n in recorder.graphs[0].graph.nodes}
    assert "fp4.dequantize.default" not in targets
