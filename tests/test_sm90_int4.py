"""Layout sm90_int4 on the CPU: every bit and scale, the way back, who chooses it, and what holds it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import poisoned
from families import expert_block, tiny
from fp4_ops.compile_passes.options import parse
from fp4_ops.meta import layouts
from fp4_ops.meta.formats import FORMATS
from fp4_ops.meta.layouts import preferred_layout
from moe_models import build
from reference import BLOCK, random_weight
from test_sm90_layout import codes_of

import fp4_ops
from fp4_ops.experts import PackedWeight
from fp4_ops.find_experts import is_experts
from fp4_ops.sm90 import int4

fp4 = torch.ops.fp4
SM90_INT4 = "sm90_int4"
SHAPES = ((64, 128), (3, 64, 256), (2, 128, 80), (1, 192, 1456), (64, 16), (2, 0, 64), (0, 64, 64))


@pytest.fixture(params=["int4", "int4_g64"])
def format(request) -> str:
    return request.param


def read(packed, scale, block):
    """The values [G, N, Kp], lane by lane from the definition in csrc/cpu/sm90_layout.h."""
    n, kp = packed.shape[-2], packed.shape[-1] * 2
    words = packed.reshape(-1, n // 16, kp // 64, 32, 16).view(torch.int32).long() & 0xFFFFFFFF
    scales = scale.reshape(-1, n // 16, kp // block, 16)
    out = torch.full((words.shape[0], n, kp), torch.nan, dtype=torch.float64)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for step in range(kp // 64):
            k = 64 * step + 16 * t
            for parity in range(2):
                codes = codes_of(words[:, :, step, lane, 2 * parity : 2 * parity + 2])
                value = (
                    torch.where(codes > 7, codes - 16, codes) * scales[:, :, k // block, 2 * g + parity, None]
                )
                out[:, 2 * g + parity :: 16, k : k + 16] = value.double()
    return out


@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s], ids=str)
def test_every_bit_is_where_the_definition_says(shape, format):
    w = random_weight(format, *shape)
    n, k = shape[-2:]
    kp = (k + 127) // 128 * 128
    with poisoned():
        packed, scale, factor = fp4.prepack(*w.operands(), format, SM90_INT4)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], kp // 2)
    assert scale.dtype == torch.float32 and scale.shape == (*shape[:-1], kp // BLOCK[format])
    assert factor.numel() == 0
    dense = read(packed, scale.double(), BLOCK[format])
    assert torch.equal(dense[..., :k], w.dense.reshape(-1, n, k)) and (dense[..., k:] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_operators_make_and_undo_the_same_bytes(shape, format):
    """What CUDA tensors get, int4.prepack and int4.unpack, is what the CPU kernels make."""
    w = random_weight(format, *shape)
    with poisoned():
        there = fp4.prepack(*w.operands(), format, SM90_INT4)
        back = fp4.unpack(*there, format, SM90_INT4)
    for mine, want in (
        (int4.prepack(w.packed, w.scale, FORMATS[format]), there),
        (int4.unpack(there[0], there[1], FORMATS[format]), back),
    ):
        for a, b in zip(mine, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b) and a.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_undoes_prepack(shape, format):
    """Codes and scales as they were, but that bfloat16 scales come back as the same numbers in float32."""
    w = random_weight(format, *shape)
    k = shape[-1]
    with poisoned():
        operands = fp4.prepack(*w.operands(), format, SM90_INT4)
        packed, scale, factor = fp4.unpack(*operands, format, SM90_INT4)
        dense = fp4.dequantize(*operands, format, torch.float64, layout=SM90_INT4)
    assert torch.equal(packed[..., : k // 2], w.packed) and not packed[..., k // 2 :].any()
    blocks = w.scale.shape[-1]
    assert scale.dtype == torch.float32 and torch.equal(scale[..., :blocks], w.scale.float())
    assert not scale[..., blocks:].any() and factor.numel() == 0
    assert torch.equal(dense[..., :k], w.dense) and (dense[..., k:] == 0).all()


def test_a_damaged_scale_is_refused(format):
    w = random_weight(format, 64, 128)
    w.scale[3, 0] = torch.nan
    with pytest.raises(RuntimeError, match="block_scale has NaN values; the weight is damaged"):
        fp4.prepack(*w.operands(), format, SM90_INT4)


@pytest.mark.parametrize("op", ["mm", "grouped_mm", "grouped_mm_masked", "indexed_mm", "grouped_mm_k", "moe"])
def test_cpu_products_refuse_it_and_fakes_know_their_shapes(op):
    lead = () if op in ("mm", "grouped_mm_k") else (2,)
    w = random_weight("int4", *lead, 64, 64, layout=SM90_INT4)
    x = torch.randn(*([2] if op == "grouped_mm_masked" else []), 4, 64).bfloat16()
    a, a_scale = fp4.quantize_fp8(x, layout="sm90")
    two, ids = torch.tensor([2, 4], dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    if op == "moe":
        w2 = random_weight("int4", 2, 64, 32, layout=SM90_INT4)
        args = (x, ids[:, None], torch.ones(4, 1), *w.operands(), *w2.operands())
        options = {"a_format": "auto"}
    else:
        rows = {"mm": (), "indexed_mm": (ids,)}.get(op, (two,))
        args, options = (a, *w.operands(), *rows, a_scale), {}
    with pytest.raises(RuntimeError, match=f"fp4::{op}: layout is 'sm90_int4', which only CUDA kernels read"):
        getattr(fp4, op)(*args, **w.options(), **options)
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in args]
    out = getattr(fp4, op)(*meta, **w.options(), **options)
    assert out.shape == (*([2] if op in ("grouped_mm_masked", "grouped_mm_k") else []), 4, 64)
    assert out.dtype == torch.bfloat16


# --- who chooses it ---


@pytest.fixture
def hopper(monkeypatch):
    """The CPU prefers what a Hopper GPU does."""
    monkeypatch.setitem(layouts._preferred, "cpu", lambda: ("sm90", SM90_INT4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("a_format", ["fp8", "auto", "none", "int8"])
def test_int4_prefers_it_where_activations_become_fp8(hopper, a_format, dtype):
    def layout(format, *shape):
        return preferred_layout("cpu", shape, (64, 64), dtype=dtype, format=format, a_format=a_format)

    fp8 = a_format in ("fp8", "auto")
    for format in ("int4", "int4_g64"):
        assert layout(format, 128, 80) == (SM90_INT4 if fp8 else "plain")
        assert layout(format, 72, 80) == layout(format, 128, 72) == "plain"
    assert layout("int4_g32", 128, 80) == "plain"
    # float32 activations reach the Hopper kernels only where all of them become fp8
    as_it_is = a_format in ("none", "auto") and dtype == torch.bfloat16
    assert layout("nvfp4", 128, 80) == ("sm90" if a_format == "fp8" or as_it_is else "plain")


def test_without_a_word_on_activations_int4_stays_plain(hopper):
    assert preferred_layout("cpu", (128, 128), format="int4") == "plain"
    assert preferred_layout("cpu", (128, 128), format="nvfp4") == preferred_layout("cpu") == "sm90"


@pytest.mark.parametrize("activation, want", [("auto", "fp8"), ("fp8", "fp8")])
def test_the_backend_quantises_what_these_weights_read(activation, want):
    options = parse(None, {"format": "int4", "activation": activation})
    assert options.wanted == activation
    assert options.a_format("cuda", SM90_INT4)[0] == want


@pytest.mark.parametrize("activation", ["auto", "fp8", "bf16"])
def test_prepare(hopper, activation, format):
    model = build("mixtral", torch.float32, "grouped_mm")
    modules = [m for m in model.modules() if is_experts(m)]
    want = [
        fp4.dequantize(*fp4.quantize(m.gate_up_proj.detach(), format), format, torch.float64) for m in modules
    ]
    report = fp4_ops.prepare(model, format, activation)
    weights = [m.gate_up_proj for m in modules]
    shape = want[0].shape
    assert shape[1] % 64 == 0 and model.config.hidden_size % 64 == 0, "the layout cannot hold this model"
    assert report.layout == ("plain" if activation == "bf16" else SM90_INT4)
    for w, dense in zip(weights, want, strict=True):
        assert w.layout == report.layout and not w.interleaved
        assert torch.equal(w.dequantize(torch.float64), dense)


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 128, 64).bfloat16())

    def forward(self, x, offs):
        return F.grouped_mm(x, self.w.transpose(-2, -1), offs=offs)


@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_the_rewrite(hopper, activation, format):
    """Whole blocks, and products alone: their rows are quantised in the order that the layout reads."""

    def calls(module, *inputs):
        with torch.no_grad():
            program = torch.export.export(module.eval(), inputs, strict=False)
        rewritten = fp4_ops.rewrite(program, {"format": format, "activation": activation})
        nodes = rewritten.graph_module.graph.nodes
        return {n.target._schema.name: n.kwargs for n in nodes if str(n.target).startswith("fp4.")}

    fp8 = activation == "fp8"
    layout = SM90_INT4 if fp8 else "plain"
    seen = calls(expert_block(tiny("mixtral", "grouped_mm")), torch.randn(1, 9, 64))
    assert list(seen) == ["fp4::moe"] and seen["fp4::moe"]["layout"] == layout
    assert seen["fp4::moe"]["a_format"] == ("fp8" if fp8 else "none")
    assert seen["fp4::moe"]["activation"] == "silu"
    offs = torch.tensor([2, 2, 5, 9], dtype=torch.int32)
    seen = calls(Product(), torch.randn(9, 64).bfloat16(), offs)
    assert list(seen) == [*["fp4::quantize_fp8"] * fp8, "fp4::grouped_mm"]
    assert seen["fp4::grouped_mm"]["layout"] == layout
    assert not fp8 or seen["fp4::quantize_fp8"]["layout"] == "sm90"


# --- what holds it ---


def test_a_packed_weight_goes_there_and_back(format):
    e, n, k = 3, 128, 80
    plain = fp4.quantize(torch.randn(e, n, k), format)
    w = PackedWeight(plain[0], plain[1], None, format, "plain")
    want = w.dequantize(torch.float64)
    for layout in (SM90_INT4, "tile16", SM90_INT4, "plain"):
        w.set_layout(layout)
        assert w.layout == layout and torch.equal(w.dequantize(torch.float64), want)
    w.set_layout(SM90_INT4)
    other = PackedWeight(*(torch.zeros_like(b) for b in w.buffers()), None, format, SM90_INT4, k)
    other.load_state_dict(w.state_dict())
    assert torch.equal(other.dequantize(torch.float64), want)


def test_a_tensor_goes_there_and_back(format):
    w = fp4_ops.quantize(torch.randn(64, 80), format)
    packed = w.prepack(SM90_INT4)
    assert packed.shape == w.shape and torch.equal(packed.dequantize(), w.dequantize())
    back = packed.prepack("plain")
    assert torch.equal(back.packed, w.packed) and torch.equal(back.block_scale, w.block_scale.float())
