"""Reference implementations of all operators in float64 and plain torch, written from the definitions.

They use nothing of fp4_ops, not even its tables, so that a wrong table fails a test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

F64 = torch.float64
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
INT4 = torch.tensor([*range(8), *range(-8, 0)], dtype=F64)
FP4_FORMATS = ("nvfp4", "mxfp4")
INT4_FORMATS = ("int4", "int4_g64", "int4_g32")
FORMATS = (*FP4_FORMATS, *INT4_FORMATS)
BLOCK = dict(zip(FORMATS, (16, 32, 128, 64, 32)))
KERNEL_FORMATS = (*FP4_FORMATS, "int4", "int4_g32")
"""Formats that together use every kernel. For the kernels, the block of int4 is only a number."""
VALUES = dict.fromkeys(FP4_FORMATS, E2M1) | dict.fromkeys(INT4_FORMATS, INT4)
SCALE_DTYPE = {
    "nvfp4": torch.float8_e4m3fn,
    "mxfp4": torch.float8_e8m0fnu,
    **dict.fromkeys(INT4_FORMATS, torch.bfloat16),
}
"""Dtype of the block scales that quantize makes. int4 takes float32 ones too."""


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def blocks(x: Tensor, block: int) -> Tensor:
    """Reshape [..., K] to [..., ceil(K / block), block], padded with zeros."""
    pad = ceil_div(x.shape[-1], block) * block - x.shape[-1]
    x = torch.nn.functional.pad(x, (0, pad))
    return x.unflatten(-1, (x.shape[-1] // block, block))


# --- formats ---


def scale_values(scale: Tensor) -> Tensor:
    """Convert block scales to float64. e4m3 and e8m0 bytes are decoded bit by bit."""
    if scale.dtype in (torch.bfloat16, torch.float32):
        return scale.to(F64)
    byte = scale.view(torch.uint8).to(torch.int64)
    if scale.dtype == torch.float8_e8m0fnu:
        value = torch.exp2((byte - 127).to(F64))
        return torch.where(byte == 255, torch.nan, value)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).to(F64)
    normal = torch.exp2((exponent - 7).to(F64)) * (1 + mantissa / 8)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = torch.where((byte & 127) == 127, torch.nan, value)
    return torch.where(byte > 127, -value, value)


def unpack_codes(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    pairs = codes.to(torch.uint8).unflatten(-1, (codes.shape[-1] // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def dequantize(packed: Tensor, scale: Tensor, global_scale: Tensor | None, format: str) -> Tensor:
    """Compute code x block scale x global scale exactly, in float64."""
    codes = unpack_codes(packed.view(torch.uint8))
    value = VALUES[format].to(packed.device)[codes.long()]
    steps = scale_values(scale).repeat_interleave(BLOCK[format], -1)[..., : value.shape[-1]]
    value = value * steps
    if format == "nvfp4":
        factor = global_scale.to(F64)
        value = value * (factor[..., None, None] if packed.dim() > 1 else factor)
    return value


def fold_int4(packed: Tensor, scale: Tensor, format: str) -> Tensor:
    """Return the weights that the Hopper kernel for int4 multiplies: e4m3(code x scale / c) x c, in float64.

    c is the least power of two for which 8 x the largest scale of the matrix / c is at most 448; 1 if all
    scales are 0.
    """
    mantissa, exponent = torch.frexp(scale.to(F64).amax((-2, -1), keepdim=True) / 56)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    c = torch.where(mantissa == 0, 1.0, torch.exp2(exponent.to(F64)))
    codes = INT4.to(packed.device)[unpack_codes(packed).long()]
    steps = (scale.to(F64) / c).float().repeat_interleave(BLOCK[format], -1)[..., : codes.shape[-1]]
    return (codes.float() * steps).to(torch.float8_e4m3fn).to(F64) * c


def nearest_e2m1(x: Tensor) -> Tensor:
    """Return the codes of the nearest e2m1 values. Ties go to the even code, values saturate at 6, and the
    sign of zero is kept."""
    distance = (x.abs()[..., None].to(F64) - E2M1[:8].to(x.device)).abs()
    nearest = distance == distance.min(-1, keepdim=True).values
    even = torch.arange(8, device=x.device) % 2 == 0
    score = nearest * 2 + (nearest & even)
    return (score.argmax(-1) + 8 * x.signbit()).to(torch.uint8)


def round_e4m3(x: Tensor) -> Tensor:
    """Round float32 to the nearest e4m3 (ties to even), saturating at 448."""
    return x.clamp(max=448.0).to(torch.float8_e4m3fn)


def over(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor, rounded once. If the divisor were a Python number, torch would multiply by its
    inverse on a GPU."""
    return x / x.new_tensor(divisor)


def quantize(x: Tensor, format: str, global_scale: Tensor | None = None):
    """Quantise by the definition, in float32 and in this order of operations, so that bits can be
    compared."""
    x = x.float()
    k, block = x.shape[-1], BLOCK[format]
    amax = blocks(x, block).abs().amax(-1)
    if format == "nvfp4":
        if global_scale is None:
            top = (
                x.abs().flatten(-2 if x.dim() > 1 else -1).amax(-1)
                if x.numel()
                else x.new_zeros(x.shape[:-2])
            )
            global_scale = torch.where(top == 0, 1.0, over(top, 6 * 448))
        factor = global_scale[..., None, None] if x.dim() > 1 else global_scale
        scale = round_e4m3(over(amax, 6) / factor)
        step = scale_values(scale).float() * factor
    elif format in INT4_FORMATS:
        scale = over(amax, 7.5).bfloat16()
        step = scale.float().repeat_interleave(block, -1)[..., :k]
        codes = torch.where(step == 0, 0.0, x / step).round().clamp(-8, 7)
        return pack_codes(codes.to(torch.int64) & 15), scale, x.new_empty(0)
    else:
        exponent = torch.frexp(amax.to(F64)).exponent - 1 - 2
        byte = torch.where(amax == 0, 0, exponent.clamp(-127, 127) + 127)
        scale = byte.to(torch.uint8).view(torch.float8_e8m0fnu)
        step = scale_values(scale).float()
        global_scale = x.new_empty(0)
    step = step.repeat_interleave(block, -1)[..., :k]
    value = torch.where(step == 0, torch.copysign(torch.zeros_like(x), x), x / step)
    return pack_codes(nearest_e2m1(value)), scale, global_scale


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with scale = amax / 127 for each block of 32, and codes rounded to nearest even, in
    float32."""
    x = x.float()
    b = blocks(x, 32)
    scale = over(b.abs().amax(-1), 127)
    codes = torch.where(scale[..., None] > 0, b / scale[..., None], 0.0).round().to(torch.int8)
    return codes.flatten(-2)[..., : x.shape[-1]], scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(F64) * scale.to(F64).repeat_interleave(32, -1)[..., : codes.shape[-1]]


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with scale = amax / 448 for each row, and codes rounded to nearest even, in float32."""
    x = x.float()
    top = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scale = over(top, 448)
    value = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0)
    return value.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    return scale_values(codes) * scale.to(F64)[..., None]


def sm90_order(codes: Tensor) -> Tensor:
    """Pad rows to a multiple of 128 and reorder them: element 16t + 8s + 4q + i of each 64 goes to 32s + 16q
    + 4t + i."""
    kp = ceil_div(codes.shape[-1], 128) * 128
    out = codes.new_zeros((*codes.shape[:-1], kp))
    for k in range(codes.shape[-1]):
        t, s, q, i = k // 16 % 4, k // 8 % 2, k // 4 % 2, k % 4
        out[..., k // 64 * 64 + 32 * s + 16 * q + 4 * t + i] = codes[..., k]
    return out


def half_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, K] as fp16 [M, Kp], with element 16t + 4c + i of each 64 at 16c + 8 (i % 2) + 2t + i / 2.
    Also return the powers of two [M] that scale the largest value of a row to at least 2^14 and below
    2^15."""
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 128))
    amax = x.abs().amax(-1)
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent, -126).clamp(min=15 - 126)
    factor = torch.ldexp(torch.ones_like(amax), exponent - 15)
    values = torch.ldexp(x, 15 - exponent[:, None]).half()
    return values.view(len(x), -1, 4, 4, 2, 2).permute(0, 1, 3, 5, 2, 4).flatten(1), factor


def plain_rows(codes: Tensor) -> Tensor:
    """Put the result of `half_rows` back into the order of k."""
    return codes.view(len(codes), -1, 4, 2, 4, 2).permute(0, 1, 4, 2, 5, 3).flatten(1)


# --- operands ---

GATES = (
    "silu", "gelu", "gelu_tanh", "silu_interleaved", "gelu_interleaved", "gelu_tanh_interleaved", "swigluoai",
    "relu2", "silu(limit=2)", "swigluoai_halves(limit=3)", "swigluoai(limit=0.5)",
    "gelu_interleaved(limit=1.5)", "situ", "situ_interleaved",
)  # fmt: skip


def rows_per_column(activation: str) -> int:
    """Return the number of rows of the first weight for each column of the second."""
    return 1 if activation == "relu2" else 2


@dataclass
class Weight:
    """A random packed weight and its exact values."""

    format: str
    packed: Tensor
    scale: Tensor
    global_scale: Tensor | None
    dense: Tensor
    layout: str = "plain"

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.packed, self.scale, self.global_scale

    def options(self) -> dict:
        return {"format": self.format, "layout": self.layout}


def _scale(format: str, shape: tuple[int, ...], narrow: bool) -> Tensor:
    """Return random block scales. Most have ordinary sizes; a few are tiny or zero."""
    ordinary = torch.rand(shape) < 0.9
    if format in INT4_FORMATS:
        scale = torch.where(ordinary, torch.rand(shape) * 0.01 + 1e-3, torch.rand(shape) * 1e-6)
        scale = torch.where(torch.rand(shape) < 0.98, scale, 0.0)
        return scale.to(torch.bfloat16 if torch.rand(()) < 0.5 else torch.float32)
    common, tiny = ((0x30, 0x48), (0x00, 0x30)) if format == "nvfp4" else ((118, 125), (95, 118))
    if format == "mxfp4" and narrow:
        tiny = (107, 118)
    scale = torch.where(ordinary, torch.randint(*common, shape), torch.randint(*tiny, shape))
    return scale.to(torch.uint8).view(SCALE_DTYPE[format])


def random_weight(
    format: str, *shape: int, device: str = "cpu", layout: str = "plain", narrow: bool = False
) -> Weight:
    """Make a random weight of the logical shape [..., N, K]. It has every code. Most scales have ordinary
    sizes; a few are tiny or zero.

    `narrow`: mxfp4 scales lie within 17 binades, the range that layouts sm90 and mma_bf16 can hold.
    """
    *lead, n, k = shape
    packed = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    global_scale = torch.rand(tuple(lead)) * 0.01 + 0.002 if format == "nvfp4" else None
    scale = _scale(format, (*lead, n, ceil_div(k, BLOCK[format])), narrow or layout in ("sm90", "mma_bf16"))
    dense = dequantize(packed, scale, global_scale, format)
    packed, scale = packed.to(device), scale.to(device)
    global_scale = None if global_scale is None else global_scale.to(device)
    if layout != "plain":
        packed, scale, global_scale = torch.ops.fp4.prepack(packed, scale, global_scale, format, layout)
    return Weight(format, packed, scale, global_scale, dense.to(device), layout)


@dataclass
class Activations:
    """Random activations of one kind as operands, and their exact values."""

    data: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    exact: Tensor
    a_format: str = ""

    def options(self) -> dict:
        return {"a_format": self.a_format}

    def rows(self, index) -> Activations:
        """Return some of the rows of 2D activations."""
        scale = None if self.scale is None else self.scale[index]
        factor = self.global_scale
        factor = factor[index] if factor is not None and factor.dim() else factor
        return Activations(self.data[index], scale, factor, self.exact[index], self.a_format)


ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, *FP4_FORMATS)
"""The kinds of activations: a dtype, or the format of packed ones."""


def random_activations(*shape: int, kind: torch.dtype | str, device: str = "cpu") -> Activations:
    x = torch.randn(shape)
    scale = factor = None
    if kind == torch.int8:
        data, scale = quantize_int8(x)
        exact = dequantize_int8(data, scale)
    elif kind == torch.float8_e4m3fn:
        data, scale = quantize_fp8(x)
        exact = dequantize_fp8(data, scale)
    elif isinstance(kind, str):
        lead = shape[: int(torch.randint(0, len(shape), ()))]  # one for all, one a group, or one a row
        factor = torch.rand(lead) * 0.01 + 0.001 if kind == "nvfp4" else None
        each = None if factor is None else factor.view(*lead, *[1] * (len(shape) - 1 - len(lead)))
        each = None if each is None else each.expand(shape[:-1]).contiguous()
        data, scale, _ = quantize(x[..., None, :], kind, each)
        exact = dequantize(data, scale, each, kind).squeeze(-2)
        data, scale = data.squeeze(-2), scale.squeeze(-2)
    else:
        data = x.to(kind)
        exact = data.to(F64)
    scale, factor = (None if t is None else t.to(device) for t in (scale, factor))
    a_format = kind if isinstance(kind, str) else ""
    return Activations(data.to(device), scale, factor, exact.to(device), a_format)


# --- matrix products ---


def mm(a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    out = a @ w.transpose(-2, -1)
    return out if bias is None else out + bias.to(F64)


def indexed_mm(a: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    out = a.new_zeros(a.shape[0], w.shape[1])
    for e in range(w.shape[0]):
        rows = ids == e
        out[rows] = mm(a[rows], w[e], None if bias is None else bias[e])
    return out


def m_indices(offs: Tensor, m: int) -> Tensor:
    """Return the expert of each row, or -1 for rows past the end."""
    out = torch.full((m,), -1, dtype=torch.int32, device=offs.device)
    start = 0
    for e, end in enumerate(offs.tolist()):
        out[start:end] = e
        start = end
    return out


def masked_indices(masked_m: Tensor, max_m: int) -> Tensor:
    """Return [G, max_m]: the group of each valid row, else -1."""
    groups = torch.arange(len(masked_m), device=masked_m.device)[:, None]
    return torch.where(torch.arange(max_m, device=masked_m.device) < masked_m[:, None], groups, -1)


def activate(h: Tensor, activation: str) -> Tensor:
    if activation == "relu2":
        return h.clamp(min=0) ** 2
    name, _, limit = activation.removesuffix(")").partition("(limit=")
    oai = name.startswith("swigluoai")
    interleaved = name == "swigluoai" or name.endswith("_interleaved")
    gate, up = (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    if limit or oai:
        most = float(limit or 7)
        gate, up = gate.clamp(max=most), up.clamp(-most, most)
    if oai:
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    name = name.removesuffix("_interleaved")
    if name == "situ":
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    if name == "silu":
        return gate * torch.sigmoid(gate) * up
    tanh = {"gelu": "none", "gelu_tanh": "tanh"}[name]
    return torch.nn.functional.gelu(gate, approximate=tanh) * up


def quantized(x: Tensor, a_format: str) -> Tensor:
    """Return the values of activations after quantisation. In FP4, each row is quantised as a matrix of its
    own."""
    if a_format == "int8":
        return dequantize_int8(*quantize_int8(x))
    if a_format == "fp8":
        return dequantize_fp8(*quantize_fp8(x))
    if a_format in FP4_FORMATS:
        packed, scale, factor = quantize(x[:, None], a_format)
        return dequantize(packed, scale, factor, a_format).squeeze(1)
    return x.to(F64)


def moe(
    x, ids, weights, w13, w2, w13_bias=None, w2_bias=None, *, activation="silu", a_format="none",
    between=None, gated=False,
) -> Tensor:  # fmt: skip
    """Compute out[t] = sum_j weights[t, j] * (w2[e] act(w13[e] x[t] + b13[e]) + b2[e]), e = ids[t, j].

    between: the dtype to which the first product is rounded, if any. gated: it is rounded after the
    activation.
    """
    out = x.new_zeros(x.shape[0], w2.shape[1], dtype=F64)
    for j, h in enumerate(moe_hidden(x, ids, w13, w13_bias, activation, a_format, between, gated)):
        h = quantized(h, a_format)
        out += weights[:, j, None].to(F64) * indexed_mm(h, w2, ids[:, j], w2_bias)
    return out


def moe_hidden(
    x, ids, w13, w13_bias, activation, a_format, between: torch.dtype | None = None, gated: bool = False
) -> list[Tensor]:
    """Return the hidden values of each column of ids, before they are quantised."""
    a = quantized(x, a_format)

    def stored(v: Tensor, here: bool) -> Tensor:
        return v.to(between).to(F64) if here and between is not None else v

    products = [stored(indexed_mm(a, w13, e, w13_bias), not gated) for e in ids.unbind(1)]
    return [stored(activate(product, activation), gated) for product in products]


def moe_between_codes(
    x, ids, weights, w13, w2, w13_bias=None, *, activation="silu", a_format="none", near=1e-5
) -> float:
    """Return the norm of the error of `moe` from hidden values that can be rounded to either of two codes.
    These are values that are closer to a border than `near` times the row's largest value, the error of
    float32. A single one can be the largest part of a small block's error."""
    if a_format == "none":
        return 0.0
    out = x.new_zeros(x.shape[0], w2.shape[1], dtype=F64)
    for j, h in enumerate(moe_hidden(x, ids, w13, w13_bias, activation, a_format)):
        off = near * h.abs().amax(-1, keepdim=True)
        change = (quantized(h + off, a_format) - quantized(h - off, a_format)).abs()
        out += weights[:, j, None].to(F64) * indexed_mm(change, w2.abs(), ids[:, j])
    return out.norm().item()


# --- comparison ---

ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""The largest relative error (norm over norm) that comes from rounding the output once."""
STEP = {torch.float16: 2.0**-25}
"""The largest absolute error of one element below the normal range, for dtypes where this matters."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the relative error, norm over norm, of finite numbers. If `want` is zero, as for a token without
    experts, the result is 0 or infinite."""
    assert torch.isfinite(got).all()
    error, norm = (got.to(F64) - want.to(F64)).norm().item(), want.to(F64).norm().item()
    return error / norm if norm else math.inf if error else 0.0


def assert_close(
    got: Tensor, want: Tensor, dtype: torch.dtype, k: int, factor: float = 1.0, typical: float = 0.0,
    more: float = 0.0,
) -> None:  # fmt: skip
    """Check the relative error, norm over norm: at most 4e-3 for bf16, 1e-3 for f16 and 2e-6 sqrt(K) for
    float32 output. NaN is an error.

    typical: the expected norm of such sums, for few sums that may cancel out by chance. more: an additional
    norm that the error may have.
    """
    assert got.dtype == dtype and got.shape == want.shape
    assert got.is_contiguous()
    assert torch.isfinite(got.float()).all(), "not finite"
    bound = factor * ROUNDING.get(dtype, 2e-6 * k**0.5)
    norm = max(want.norm().item(), typical)
    error = (got.to(F64) - want).norm().item()
    slack = STEP.get(dtype, 0) * want.numel() ** 0.5 + more
    assert error <= bound * norm + slack, f"relative error {error / max(norm, 1e-300):.3g} > {bound:.3g}"


@dataclass
class ProductBounds:
    """Bounds on a product's sums, for exact `a` [M, K] and `w` [N, K], or [G, N, K] with `ids` [M]."""

    k: int
    norms: Tensor
    """The expected norm of each row's sums."""
    mass: Tensor
    """The norm of each row's sums of the products' magnitudes."""

    @staticmethod
    def of(a: Tensor, w: Tensor, ids: Tensor | None = None) -> ProductBounds:
        def product(a: Tensor, w: Tensor) -> Tensor:
            return mm(a, w) if ids is None else indexed_mm(a, w, ids)

        squares = product(a.square(), w.square()).sum(-1)
        return ProductBounds(max(a.shape[-1], 1), squares.sqrt(), product(a.abs(), w.abs()).norm(dim=-1))

    def rows(self, index: Tensor) -> ProductBounds:
        return ProductBounds(self.k, self.norms[index], self.mass[index])

    def assert_close(self, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
        """Check the whole result with `assert_close`, and also each row, so that a single wrong row is found.
        A row may have the rounding error of the output, and that of the accumulation, which is at most about
        2^-23 sqrt(K) of the mass."""
        live = (want != 0).any(-1)
        assert_close(got, want, dtype, self.k, typical=self.norms[live].norm().item())
        rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-23}[dtype]
        norm = want.norm(dim=-1)
        slack = rounding * norm + 2**-23 * self.k**0.5 * (self.mass + norm)
        slack += STEP.get(dtype, 0) * want.shape[-1] ** 0.5
        error = (got.to(F64) - want).norm(dim=-1)
        bad = error > slack
        assert not bad.any(), f"rows {bad.nonzero().flatten().tolist()[:8]} wrong: {error[bad][:8].tolist()}"


# ---- int8 rows and weights of the mma.sync kernels, with a step for 128 K ----


def int8_rows(x: Tensor) -> Tensor:
    """Return the values of int8 rows: a scale of largest / 127 for 128 K, the quotient in float32."""
    cut = blocks(x.double(), 128)
    most = cut.abs().amax(-1, keepdim=True).float()
    up = torch.where(most > 0, 127 / most, 0).double()
    return ((cut * up).round() * (most / 127).double()).flatten(-2)[..., : x.shape[-1]]


def int8_weights(codes_by_scales: Tensor, scales: Tensor, format: str) -> Tensor:
    """Return weights [.., K] of block scales `scales` beside int8 rows: integers times a step that a row
    has for 128 K, so that 6 times its largest scale is 120 to 127 for nvfp4, and 96 for mxfp4."""
    most = blocks(scales.double(), 128 // BLOCK[format]).amax(-1)
    if format == "mxfp4":
        inverse = torch.where(most > 0, 16 / most, 0)
    else:  # as fp16 the bits of a constant less those of the scale
        bits = 0xA900 - (most.clamp(min=2**-10) * 128).half().view(torch.int16).int()
        inverse = bits.to(torch.int16).view(torch.float16).double() / 2
    largest = 6 * most * inverse
    assert ((most == 0) | (largest == 96) | (largest >= 120) & (largest < 127)).all()
    inverse = inverse.repeat_interleave(128, -1)[..., : codes_by_scales.shape[-1]]
    return torch.where(inverse > 0, (codes_by_scales * inverse).round() / inverse, 0)
