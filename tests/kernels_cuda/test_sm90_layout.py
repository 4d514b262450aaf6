"""FP4 weight layouts of the Hopper kernels on the CPU: every bit is where csrc/common/sm90_layout.h says."""

from __future__ import annotations

import pytest
import torch
from conftest import poisoned
from reference import BLOCK, FP4_FORMATS, dequantize, random_weight, scale_values, unpack_codes

fp4 = torch.ops.fp4
U8 = torch.uint8
SHAPES = ((64, 128), (3, 64, 256), (2, 128, 80), (1, 192, 1456), (64, 16), (2, 0, 64), (0, 64, 64))


@pytest.fixture(params=FP4_FORMATS)
def format(request) -> str:
    return request.param


@pytest.fixture(params=["sm90", "mma_bf16"])
def layout(request) -> str:
    return request.param


ROTATIONS = (0, 4, 10, 8, 2, 6, 12, 14)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def lanes(packed, block_scale, layout):
    """Return each lane's four words [G, N/16, Kp/128, lane, 4, lower or upper half] and scales: four, or for
    blocks of 32 the four of two lanes, or two."""
    n, kp = packed.shape[-2], packed.shape[-1] * 2
    words = packed.reshape(-1, n // 16, kp // 128, 2, 32, 16).view(torch.int32).long() & 0xFFFFFFFF
    words = words.unflatten(-1, (2, 2)).transpose(-4, -3).flatten(-3, -2)
    scales = block_scale.reshape(-1, n // 16, kp // 128, block_scale.shape[-1] // (kp // 128) * 16)
    if kp == 16 * block_scale.shape[-1]:
        scales = scales.unflatten(-1, (32, 4))
    elif layout == "mma_bf16":
        scales = scales.unflatten(-1, (32, 2)).repeat(1, 1, 1, 1, 2)
    else:
        scales = scales.unflatten(-1, (16, 4)).repeat_interleave(2, -2)
    if layout == "mma_bf16":
        g, t = torch.arange(32) // 4, torch.arange(32) % 4
        words = words[:, :, :, g // 2 * 8 + t // 2 * 4 + g % 2 * 2 + (t + g // 2) % 2]
    return words, scales


def codes_of(words, number, layout):
    """The 16 codes of a lane's block, of its words [.., 4, 2]."""
    out = []
    for k in range(16):
        if layout == "sm90":
            word = words[..., number, k // 8]
            magnitude, sign = word >> k // 4 % 2 * 16 + k % 4 * 4, word >> k % 4 * 8 + (7, 3)[k // 4 % 2]
        else:
            lower, upper = words[..., k % 8 // 2, :].unbind(-1)
            pair = number // 2 * 4 + k // 8 * 2 + number % 2
            mixed = lower & 0x06030603 | upper & 0xF9FCF9FC
            held = mixed if pair % 4 == 3 else upper if pair > 3 else lower
            turned = (held << ROTATIONS[pair] | held >> 32 - ROTATIONS[pair]) >> k % 2 * 16
            magnitude, sign = turned >> 6, turned >> 15
        out.append(magnitude & 7 | (sign & 1) << 3)
    return torch.stack(out, -1)


def scale_of(byte, layout):
    """e4m3, with bit 7 where its mantissa is 0 or 7; or {exponent + 10, mantissa}, and 0 for zero."""
    if layout == "mma_bf16":
        value = (1 + (byte & 7).double() / 8) * 2.0 ** ((byte >> 3).double() - 10)
        return torch.where(byte == 0, 0.0, value)
    flag, mantissa = byte >> 7, byte & 7
    assert torch.equal(flag == 1, (mantissa == 0) | (mantissa == 7))
    return scale_values((byte & 127).view(torch.float8_e4m3fn))


def read(packed, block_scale, factor, layout):
    """The values [G, N, Kp], read lane by lane from the definition."""
    words, scales = lanes(packed, block_scale, layout)
    groups, tiles, steps = words.shape[:3]
    out = torch.full((groups, tiles * 16, steps * 128), torch.nan, dtype=torch.float64)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for number in range(4):
            c, r = divmod(number, 2)
            codes = codes_of(words[:, :, :, lane], number, layout)
            value = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
            value = value * scale_of(scales[:, :, :, lane, number], layout)[..., None]
            block = 2 * t + c if layout == "mma_bf16" else 4 * c + t
            out.view(groups, tiles, 16, steps, 8, 16)[:, :, 2 * g + r, :, block] = value
    return out * factor.double().reshape(-1, 1, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s], ids=str)
def test_every_bit_is_where_the_definition_says(shape, format, layout):
    w = random_weight(format, *shape, narrow=True)
    with poisoned():
        packed, scale, factor = fp4.prepack(*w.operands(), format, layout)
    n, k = shape[-2:]
    kp = (k + 127) // 128 * 128
    assert packed.shape == (*shape[:-1], kp // 2) and scale.shape == (*shape[:-1], kp // BLOCK[format])
    assert packed.dtype == scale.dtype == U8 and factor.dtype == torch.float32 and factor.shape == shape[:-2]
    got = read(packed, scale, factor, layout)
    assert torch.equal(got[..., :k], w.dense.reshape(-1, n, k))
    assert (got[..., k:] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_undoes_prepack(shape, format, layout):
    w = random_weight(format, *shape, narrow=True)
    k = shape[-1]
    with poisoned():
        operands = fp4.prepack(*w.operands(), format, layout)
        packed, scale, factor = fp4.unpack(*operands, format, layout)
        dense = fp4.dequantize(*operands, format, torch.float64, layout=layout)
    assert torch.equal(dense[..., :k], w.dense) and (dense[..., k:] == 0).all()
    assert torch.equal(dequantize(packed, scale, factor, format)[..., :k], w.dense)
    blocks = w.scale.shape[-1]
    was, now = w.scale.view(U8), scale[..., :blocks].view(U8)
    if format == "nvfp4":
        assert torch.equal(factor, w.global_scale) and torch.equal(now, was)
        zero = (was & 0x7F == 0).repeat_interleave(8, -1) & (layout == "mma_bf16")  # has zero codes
        assert torch.equal(packed[..., : k // 2], torch.where(zero, 0, w.packed))
    else:
        assert factor.numel() == 0
        some = torch.nn.functional.pad(w.dense != 0, (0, blocks * 32 - k)).unflatten(-1, (blocks, 32)).any(-1)
        assert torch.equal(now[some], was[some])  # nor the scale of a block of zeros
        kept = some.repeat_interleave(32, -1)[..., :k]
        assert torch.equal(unpack_codes(packed)[..., :k][kept], unpack_codes(w.packed)[kept])


def test_every_scale_and_code(layout):
    """All e4m3 scales that are not negative, subnormals too, with all codes."""
    scale = torch.arange(127, dtype=U8).repeat(64, 1)
    scale = torch.nn.functional.pad(scale, (0, 1)).view(torch.float8_e4m3fn)
    packed = torch.randint(0, 256, (64, 128 * 8), dtype=U8)
    packed[0] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=U8).repeat(128)
    one = torch.tensor(1.0)
    operands = fp4.prepack(packed, scale, one, "nvfp4", layout)
    assert torch.equal(read(*operands, layout)[0], dequantize(packed, scale, one, "nvfp4"))
    assert torch.equal(fp4.unpack(*operands, "nvfp4", layout)[1].view(U8), scale.view(U8))


def test_mxfp4_spread(layout):
    """17 binades below a matrix's largest exponent fit; 18 do not, and the error names the matrix."""
    packed = torch.randint(0, 256, (3, 64, 64), dtype=U8) | 0x11
    scale = torch.randint(120, 131, (3, 64, 4), dtype=U8)
    scale[1, 5, 2], scale[1, 60, 0] = 113, 130
    scale[0, 0, 0], scale[0, 63, 3] = 0, 255 - 1
    packed[0] = 0  # what stands before zeros does not matter
    scale8 = scale.view(torch.float8_e8m0fnu)
    operands = fp4.prepack(packed, scale8, None, "mxfp4", layout)
    assert torch.equal(
        fp4.dequantize(*operands, "mxfp4", torch.float64, layout=layout),
        dequantize(packed, scale8, None, "mxfp4"),
    )
    assert operands[2][0] == 1 and operands[2][1] == 2.0 ** (130 - 135)
    scale[1, 5, 2] = 112
    with pytest.raises(
        RuntimeError, match=f"matrix 1 spreads over 18 binades; layout '{layout}' holds at most 17"
    ):
        fp4.prepack(packed, scale8, None, "mxfp4", layout)


@pytest.mark.parametrize("exponent", [0, 5, 254])
def test_mxfp4_extreme_exponents(exponent, layout):
    packed = torch.randint(0, 256, (64, 64), dtype=U8)
    scale = torch.full((64, 4), exponent, dtype=U8).view(torch.float8_e8m0fnu)
    operands = fp4.prepack(packed, scale, None, "mxfp4", layout)
    want = dequantize(packed, scale, None, "mxfp4")
    assert torch.equal(fp4.dequantize(*operands, "mxfp4", torch.float64, layout=layout), want)
    assert torch.equal(dequantize(*fp4.unpack(*operands, "mxfp4", layout), "mxfp4"), want)


def test_damaged_and_negative_scales_are_refused(format, layout):
    w = random_weight(format, 64, 64, narrow=True)
    scale = w.scale.view(U8).clone()
    scale[3, 1] = 0x7F if format == "nvfp4" else 0xFF
    with pytest.raises(RuntimeError, match="block_scale has NaN values; the weight is damaged"):
        fp4.prepack(w.packed, scale.view(w.scale.dtype), w.global_scale, format, layout)
    if format == "nvfp4":
        scale[3, 1] = 0xB0
        with pytest.raises(RuntimeError, match=f"block_scale has negative values; layout '{layout}' cannot"):
            fp4.prepack(w.packed, scale.view(w.scale.dtype), w.global_scale, format, layout)


def test_unpack_as_another_format(layout):
    """Scales that are no powers of two never come from mxfp4."""
    packed, scale, factor = fp4.prepack(*random_weight("nvfp4", 64, 64).operands(), "nvfp4", layout)
    with pytest.raises(RuntimeError, match=r"block_scale has shape \[64, 8\]; it must be \[64, 4\]"):
        fp4.unpack(packed, scale, factor, "mxfp4", layout)
    with pytest.raises(RuntimeError, match="packed is no mxfp4 weight: its scales are not all powers of two"):
        fp4.unpack(packed, scale[:, ::2].contiguous(), factor, "mxfp4", layout)


@pytest.mark.parametrize("op", ["mm", "grouped_mm", "grouped_mm_masked", "indexed_mm", "grouped_mm_k", "moe"])
def test_cpu_products_refuse_it(op):
    lead = () if op in ("mm", "grouped_mm_k") else (2,)
    w = random_weight("nvfp4", *lead, 64, 64, layout="sm90")
    x = torch.randn(*([2] if op == "grouped_mm_masked" else []), 4, 64).bfloat16()
    a, a_scale = fp4.quantize_fp8(x, layout="sm90") if op == "mm" else (x, None)
    two, ids = torch.tensor([2, 4], dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    if op == "moe":
        w2 = random_weight("nvfp4", 2, 64, 32, layout="sm90")
        args = (x, ids[:, None], torch.ones(4, 1), *w.operands(), *w2.operands())
        options = {"a_format": "fp8"}
    else:
        rows = {"mm": (), "indexed_mm": (ids,)}.get(op, (two,))
        args, options = (a, *w.operands(), *rows, a_scale), {}
    with pytest.raises(RuntimeError, match=f"fp4::{op}: layout is 'sm90', which only CUDA kernels read"):
        getattr(fp4, op)(*args, **w.options(), **options)
