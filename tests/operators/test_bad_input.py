"""Bad calls: each names the argument and says what it must be, in the same words from fakes and kernels."""

# ruff: noqa: E501  one case a line

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch
from reference import FORMATS, random_weight

from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.meta.slot_checks import slot_bytes

fp4 = torch.ops.fp4

G, N, K, M = 3, 20, 64, 6
I32 = torch.int32
DENSE = ("mm", "grouped_mm_k")
BAD_LIMITS = (
    "silu(limit=0)", "silu(limit=-1)", "silu(limit=inf)", "silu(limit=nan)", "silu(limit=1e40)", "silu()", "silu(limit)", "silu(7)", "silu(limit=1",
    "silu(limit=1)x", "silu(limit=1,limit=2)", "silu(limit= 1)", "silu(alpha=1)", "relu2(limit=1)", "silu(limit=1_0)",
)  # fmt: skip
PRODUCTS = ("mm", "grouped_mm", "grouped_mm_masked", "indexed_mm", "grouped_mm_k")


@dataclass(frozen=True)
class Bad:
    """One mutation of a good call and the message it must give."""

    op: str
    changes: dict = field(hash=False)  # argument name -> new value, or a function of the old one
    message: str
    case: str = ""  # which good call: a_scale and int8 activations need their own

    def __str__(self) -> str:
        return f"{self.op}-{'+'.join(self.changes)}-{self.message[:40]}"


def good(op: str, device: str, case: str = "") -> dict:
    """A good call as keyword arguments, nvfp4 unless the case is another format."""
    format = case if case in FORMATS else "nvfp4"
    x = torch.randn(M, K, device=device)
    if op == "quantize":
        return {"x": torch.randn(G, N, K, device=device), "format": format, "global_scale": None}
    if op == "quantize_int8":
        return {"x": x}
    if op == "quantize_fp8":
        return {"x": x, "layout": "plain"}
    if op in ("offs_to_m_indices", "m_indices_to_offs"):
        offs = torch.tensor([2, 2, 5], dtype=I32, device=device)
        if op == "offs_to_m_indices":
            return {"offs": offs, "m": M}
        return {"m_indices": torch.tensor([0, 0, 2, -1], dtype=I32, device=device), "num_groups": G}
    if op == "to_masked":
        return {"a": x, "offs": torch.tensor([2, 2, 5], dtype=I32, device=device), "max_m": 4}
    if op == "from_masked":
        a = torch.randn(G, 4, K, device=device)
        return {"a": a, "masked_m": torch.tensor([2, 0, 3], dtype=I32, device=device), "m": M}
    if op == "moe_slots":
        args = good("moe", device, case)
        weights = [args[n] for n in list(args)[3:11]]
        slots = torch.zeros(slot_bytes(weights, 2), dtype=torch.uint8, device=device)
        return {**args, "slots": slots, "state": torch.zeros(G + 5, dtype=I32, device=device)}
    if op == "moe":
        w13, w2 = (random_weight(format, G, *s, device=device) for s in ((2 * 32, K), (K, 32)))
        return {
            "x": x,
            "topk_ids": torch.randint(0, G, (M, 2), device=device),
            "topk_weights": torch.rand(M, 2, device=device),
            "w13": w13.packed, "w13_scale": w13.scale, "w13_global_scale": w13.global_scale,
            "w2": w2.packed, "w2_scale": w2.scale, "w2_global_scale": w2.global_scale,
            "w13_bias": torch.randn(G, 64, device=device), "w2_bias": torch.randn(G, K, device=device),
            "format": format, "layout": "plain", "activation": "silu", "a_format": "none", "out_dtype": None,
        }  # fmt: skip
    w = random_weight(format, *(() if op in DENSE else (G,)), N, K, device=device)
    if op == "dequantize":
        return {
            "packed": w.packed, "block_scale": w.scale, "global_scale": w.global_scale,
            "format": format, "dtype": torch.float32, "layout": "plain",
        }  # fmt: skip
    if op in ("prepack", "unpack"):
        return {
            "packed": w.packed, "block_scale": w.scale, "global_scale": w.global_scale,
            "format": format, "layout": "plain",
        }  # fmt: skip
    a = x.expand(G, M, K).contiguous() if op == "grouped_mm_masked" else x
    a_scale = a_global_scale = None
    a_format = ""
    if case == "int8":
        a, a_scale = fp4.quantize_int8(a)
    if case == "fp8":
        a, a_scale = fp4.quantize_fp8(a)
    if case in ("w4a4", "w4a4 mxfp4"):
        a_format = case.removeprefix("w4a4 ").replace("w4a4", "nvfp4")
        a, a_scale, a_global_scale = fp4.quantize(a, a_format)
    rest = {"a_scale": a_scale, "a_global_scale": a_global_scale, "a_format": a_format}
    args = {"a": a, "b": w.packed, "b_scale": w.scale, "b_global_scale": w.global_scale}
    if op == "grouped_mm_k":
        args["offs"] = torch.tensor([0, 0, 64], dtype=I32, device=device)
    if op == "grouped_mm":
        args["offs"] = torch.tensor([2, 2, 5], dtype=I32, device=device)
    if op == "grouped_mm_masked":
        args["masked_m"] = torch.tensor([2, 0, 6], dtype=I32, device=device)
    if op == "indexed_mm":
        args["expert_ids"] = torch.randint(0, G, (M,), device=device)
    bias = torch.randn(*(() if op in DENSE else (G,)), N, device=device)
    if op != "grouped_mm_k":
        rest["bias"] = bias
    return {**args, **rest, "format": format, "layout": "plain", "out_dtype": None}


def to(dtype):
    return lambda t: t.to(dtype)


def cut(t):
    return t[..., :-1]


def first(t):
    return t[0]


FLOAT_NAMES = "float32 or bfloat16 or float16"
FORMAT_NAMES = "it must be one of: int4, int4_g32, int4_g64, mxfp4, nvfp4"
LAYOUT_NAMES = "it must be one of: " + ", ".join(sorted(LAYOUTS))
ACTIVATION_NAMES = f"{FLOAT_NAMES} or int8 or float8_e4m3fn or uint8 or float4_e2m1fn_x2"


def weight_cases(op: str, b: str, device_like: str = "") -> list[Bad]:
    """List the mistakes in a packed weight called `b`."""
    grouped = op not in DENSE
    rows, k = (N, K) if b == "b" else {"w13": (64, K), "w2": (K, 32)}[b]
    lead = f"{G}, " if grouped else ""
    dim = 3 if grouped else 2
    global_shape = f"[{G}]" if grouped else "[]"
    return [
        Bad(op, {b: to(torch.int8)}, f"{b} has dtype int8; it must be uint8 or float4_e2m1fn_x2"),
        Bad(op, {b: first}, f"{b} has {dim - 1} dimensions; it must have {dim}"),
        Bad(op, {f"{b}_scale": to(torch.float32)}, f"{b}_scale has dtype float32; it must be float8_e4m3fn"),
        Bad(op, {f"{b}_scale": to(torch.float32)}, f"{b}_scale has dtype float32; it must be float8_e8m0fnu", "mxfp4"),
        Bad(op, {f"{b}_scale": cut}, f"{b}_scale has shape [{lead}{rows}, {k // 16 - 1}]; it must be [{lead}{rows}, {k // 16}]"),
        Bad(op, {f"{b}_scale": first}, f"{b}_scale has shape [{str(rows) + ', ' if grouped else ''}{k // 16}]; it must be [{lead}{rows}, {k // 16}]"),
        Bad(op, {f"{b}_global_scale": None}, f"{b}_global_scale is missing; format nvfp4 needs one"),
        Bad(op, {f"{b}_global_scale": to(torch.float64)}, f"{b}_global_scale has dtype float64; it must be float32"),
        Bad(op, {f"{b}_global_scale": lambda t: t.reshape(-1)[:1].expand(5)}, f"{b}_global_scale has shape [5]; it must be {global_shape}"),
        Bad(op, {f"{b}_global_scale": lambda _: torch.ones(G)}, f"{b}_global_scale was given; format mxfp4 has no global scale", "mxfp4"),
        Bad(op, {f"{b}_global_scale": lambda _: torch.ones(G)}, f"{b}_global_scale was given; format int4 has no global scale", "int4"),
        Bad(op, {f"{b}_scale": to(torch.float16)}, f"{b}_scale has dtype float16; it must be bfloat16 or float32", "int4"),
        Bad(op, {b: lambda t: t.view(torch.float4_e2m1fn_x2)}, f"{b} has dtype float4_e2m1fn_x2; it must be uint8", "int4_g32"),
        Bad(op, {f"{b}_scale": lambda t: t[..., :0]}, f"{b}_scale has shape [{lead}{rows}, 0]; it must be [{lead}{rows}, 1]", "int4_g64"),
    ]  # fmt: skip


def matmul_cases(op: str) -> list[Bad]:
    masked = op == "grouped_mm_masked"
    dim = 3 if masked else 2
    lead = f"{G}, " if masked else ""
    rows = f"[{G}, {M}]" if masked else f"[{M}]"
    return [
        Bad(op, {"format": "fp4"}, f"format is 'fp4'; {FORMAT_NAMES}"),
        Bad(op, {"layout": "tiles"}, f"layout is 'tiles'; {LAYOUT_NAMES}"),
        *weight_cases(op, "b"),
        Bad(op, {"a": to(torch.float64)}, f"a has dtype float64; it must be {ACTIVATION_NAMES}"),
        Bad(op, {"a": first}, f"a has {dim - 1} dimensions; it must have {dim}"),
        Bad(
            op, {"a": lambda a: a[..., :-2]}, f"a has {K - 2} columns; b has K = {K}, and they must be equal"
        ),
        Bad(op, {"a": to(torch.int8)}, "a_scale is missing; int8 activations need one"),
        Bad(op, {"a_scale": lambda _: torch.ones(M, 2)}, "a_scale was given; float32 activations have none"),
        Bad(op, {"a_scale": to(torch.float16)}, "a_scale has dtype float16; it must be float32", "int8"),
        Bad(op, {"a_scale": cut}, f"a_scale has shape [{lead}{M}, 1]; it must be [{lead}{M}, 2]", "int8"),
        Bad(op, {"a": to(torch.float8_e4m3fn)}, "a_scale is missing; float8_e4m3fn activations need one"),
        Bad(op, {"a_scale": to(torch.float64)}, "a_scale has dtype float64; it must be float32", "fp8"),
        Bad(op, {"a_scale": lambda s: s[..., None]}, f"a_scale has shape {rows[:-1]}, 1]; it must be {rows}", "fp8"),
        Bad(op, {"a_format": "nvfp4"}, "a_format is 'nvfp4'; only packed a has one, for others it must be ''"),
        Bad(op, {"a_format": "int4"}, "a_format is 'int4'; for packed a it must be one of: mxfp4, nvfp4", "w4a4"),
        Bad(op, {"a_format": ""}, "a_format is ''; for packed a it must be one of: mxfp4, nvfp4", "w4a4"),
        Bad(op, {"a_format": "mxfp4"}, "a_scale has dtype float8_e4m3fn; it must be float8_e8m0fnu", "w4a4"),
        Bad(op, {"a": cut}, f"a has {K - 2} columns; b has K = {K}, and they must be equal", "w4a4"),
        Bad(op, {"a_scale": None}, "a_scale is missing; mxfp4 activations need one", "w4a4 mxfp4"),
        Bad(op, {"a_scale": cut}, f"a_scale has shape [{lead}{M}, 3]; it must be [{lead}{M}, 4]", "w4a4"),
        Bad(op, {"a_global_scale": None}, "a_global_scale is missing; nvfp4 activations need one", "w4a4"),
        Bad(op, {"a_global_scale": to(torch.float16)}, "a_global_scale has dtype float16; it must be float32", "w4a4"),
        Bad(op, {"a_global_scale": lambda _: torch.ones(7)}, f"a_global_scale has shape [7]; it must be [{G if masked else M}]", "w4a4"),
        Bad(op, {"a_global_scale": lambda _: torch.ones(2, 2, 2)}, f"a_global_scale has 3 dimensions; it must have at most {dim - 1}", "w4a4"),
        Bad(op, {"a_global_scale": lambda _: torch.ones(())}, "a_global_scale was given; only nvfp4 activations have one", "w4a4 mxfp4"),
        Bad(op, {"a_global_scale": lambda _: torch.ones(())}, "a_global_scale was given; only nvfp4 activations have one", "int8"),
        Bad(op, {"out_dtype": torch.int8}, f"out_dtype is int8; it must be {FLOAT_NAMES}"),
        Bad(op, {"out_dtype": torch.float64}, f"out_dtype is float64; it must be {FLOAT_NAMES}"),
        *(() if op == "grouped_mm_k" else bias_cases(op)),
    ]  # fmt: skip


def bias_cases(op: str) -> list[Bad]:
    bias = f"[{N}]" if op == "mm" else f"[{G}, {N}]"
    shorter = f"[{N - 1}]" if op == "mm" else f"[{G}, {N - 1}]"
    return [
        Bad(op, {"bias": to(torch.int32)}, f"bias has dtype int32; it must be {FLOAT_NAMES}"),
        Bad(op, {"bias": cut}, f"bias has shape {shorter}; it must be {bias}"),
    ]


def sm90(**changes):
    """Operands in the shapes of layout sm90, some of them changed."""
    kp = 128
    good = {
        "b": torch.zeros(G, 64, kp // 2, dtype=torch.uint8),
        "b_scale": torch.zeros(G, 64, kp // 16, dtype=torch.uint8),
        "b_global_scale": torch.ones(G),
        "bias": None,
        "layout": "sm90",
        "a": torch.randn(M, K).bfloat16(),
    }
    return {**good, **changes}


def moe_sm90(**changes):
    w13, w2 = (random_weight("nvfp4", G, *s, layout="sm90") for s in ((2 * 32, K), (K, 32)))
    good = {
        "w13": w13.packed, "w13_scale": w13.scale, "w13_global_scale": w13.global_scale,
        "w2": w2.packed, "w2_scale": w2.scale, "w2_global_scale": w2.global_scale, "layout": "sm90",
    }  # fmt: skip
    return {**good, **changes}


def bf16(**changes):
    return sm90(layout="mma_bf16", **changes)


def bf16_block(**changes):
    return {**moe_sm90(layout="mma_bf16"), **changes}


def sm90_cases() -> list[Bad]:
    """What layout sm90 asks for: its shapes, with both its formats, and its activations."""
    op, u8, fp8 = "grouped_mm", torch.uint8, torch.zeros(M, 128, dtype=torch.float8_e4m3fn)
    needs, padded = (
        "layout 'sm90' needs a multiple of",
        "b has K = 128 (padded to a multiple of 128), and they must be equal",
    )
    return [
        Bad(op, {"layout": "sm90"}, "format is 'int4'; with layout 'sm90' it must be one of: mxfp4, nvfp4", "int4"),
        Bad("prepack", {"layout": "sm90"}, "format is 'int4_g64'; with layout 'sm90' it must be one of: mxfp4, nvfp4", "int4_g64"),
        Bad(op, sm90(b=torch.zeros(G, 80, 64, dtype=u8)), f"b has 80 rows; {needs} 64"),
        Bad(op, sm90(b=torch.zeros(G, 64, 32, dtype=u8)), f"b has 64 columns; {needs} 128"),
        Bad(op, sm90(b_scale=torch.zeros(G, 64, 8).to(torch.float8_e4m3fn)), "b_scale has dtype float8_e4m3fn; it must be uint8"),
        Bad(op, sm90(b_scale=torch.zeros(G, 64, 4, dtype=u8)), f"b_scale has shape [{G}, 64, 4]; it must be [{G}, 64, 8]"),
        Bad(op, sm90(), f"b_scale has shape [{G}, 64, 8]; it must be [{G}, 64, 4]", "mxfp4"),
        Bad(op, sm90(b_scale=torch.zeros(G, 64, 4, dtype=u8), b_global_scale=None), "b_global_scale is missing; layout 'sm90' needs one", "mxfp4"),
        Bad(op, sm90(b_global_scale=torch.ones(2)), f"b_global_scale has shape [2]; it must be [{G}]"),
        Bad(op, sm90(a=torch.randn(M, K)), "a has dtype float32; layout 'sm90' reads bfloat16 or float16 or float8_e4m3fn or uint8 or float4_e2m1fn_x2"),
        Bad(op, sm90(a=torch.randn(M, 72).half()), f"a has 72 columns; {needs} 16"),
        Bad(op, sm90(a=torch.randn(M, 144).half()), f"a has 144 columns; {padded}"),
        Bad(op, sm90(a=fp8), "a_scale is missing; float8_e4m3fn activations need one"),
        Bad(op, sm90(a=fp8[:, :64]), f"a has 64 columns; {padded}"),
        Bad("prepack", {"layout": "sm90"}, f"packed has {N} rows; {needs} 64"),
        Bad("prepack", {"layout": "sm90", "packed": torch.zeros(G, 64, 36, dtype=u8), "block_scale": torch.zeros(G, 64, 5).to(torch.float8_e4m3fn)},
            f"packed has 72 columns; {needs} 16"),
        Bad("unpack", {"layout": "sm90"}, f"packed has {N} rows; {needs} 64"),
        Bad("dequantize", {"layout": "sm90"}, f"packed has {N} rows; {needs} 64"),
        Bad("moe", moe_sm90(a_format="int8"), "a_format is 'int8'; with layout 'sm90' it must be one of: none, fp8, nvfp4, mxfp4, auto; layout 'plain' takes others"),
        Bad("moe", moe_sm90(), "x has dtype float32; layout 'sm90' reads bfloat16 or float16"),
        Bad("moe", moe_sm90(a_format="fp8", x=torch.randn(M, 72)), f"x has 72 columns; {needs} 16"),
        Bad(op, bf16(a=fp8), "a has dtype float8_e4m3fn; layout 'mma_bf16' reads bfloat16 or float16 or uint8 or float4_e2m1fn_x2"),
        Bad(op, bf16(a=torch.randn(M, K)), "a has dtype float32; layout 'mma_bf16' reads bfloat16 or float16 or uint8 or float4_e2m1fn_x2"),
        Bad("moe", bf16_block(a_format="auto"), "a_format is 'auto'; with layout 'mma_bf16' it must be one of: none, int8, nvfp4, mxfp4; layout 'plain' takes others"),
        Bad("moe", bf16_block(x=torch.randn(M, K)), "x has dtype float32; layout 'mma_bf16' reads bfloat16 or float16"),
    ]  # fmt: skip


def int4(**changes):
    """Operands in the shapes of layout sm90_int4, some of them changed."""
    good = {
        "b": torch.zeros(G, 64, 64, dtype=torch.uint8), "b_scale": torch.zeros(G, 64, 1), "b_global_scale": torch.ones(G),
        "bias": None, "layout": "sm90_int4", "a": torch.zeros(M, 128, dtype=torch.float8_e4m3fn),
        "a_scale": torch.zeros(M),
    }  # fmt: skip
    return {**good, **changes}


def moe_int4(**changes):
    w13, w2 = (random_weight("int4_g64", G, *s, layout="sm90_int4") for s in ((2 * 32, K), (K, 32)))
    good = {
        "w13": w13.packed, "w13_scale": w13.scale, "w13_global_scale": w13.global_scale,
        "w2": w2.packed, "w2_scale": w2.scale, "w2_global_scale": w2.global_scale, "layout": "sm90_int4",
    }  # fmt: skip
    return {**good, **changes}


def int4_cases() -> list[Bad]:
    """What layout sm90_int4 asks for: a factor, fp8 rows."""
    op, u8 = "grouped_mm", torch.uint8
    held = "with layout 'sm90_int4' it must be one of: int4, int4_g32, int4_g64"
    needs = "layout 'sm90_int4' needs a multiple of"
    reads = "layout 'sm90_int4' reads float8_e4m3fn (from quantize_fp8 with layout='sm90')"
    a_formats = "with layout 'sm90_int4' it must be one of: fp8, auto; layout 'plain' takes others"
    return [
        Bad("prepack", {"layout": "sm90_int4"}, f"format is 'nvfp4'; {held}"),
        Bad("prepack", {"layout": "sm90_int4"}, f"packed has {N} rows; {needs} 64", "int4"),
        Bad("prepack", {"layout": "sm90_int4", "packed": torch.zeros(G, 64, 36, dtype=u8), "block_scale": torch.zeros(G, 64, 1)},
            f"packed has 72 columns; {needs} 16", "int4"),
        Bad("unpack", {"layout": "sm90_int4"}, f"packed has {N} rows; {needs} 64", "int4_g64"),
        Bad("dequantize", {"layout": "sm90_int4"}, f"packed has {N} rows; {needs} 64", "int4"),
        Bad(op, int4(), f"format is 'mxfp4'; {held}", "mxfp4"),
        Bad(op, int4(b=torch.zeros(G, 80, 64, dtype=u8)), f"b has 80 rows; {needs} 64", "int4"),
        Bad(op, int4(b=torch.zeros(G, 64, 32, dtype=u8)), f"b has 64 columns; {needs} 128", "int4"),
        Bad(op, int4(b_scale=torch.zeros(G, 64, 1).bfloat16()), "b_scale has dtype bfloat16; it must be float32", "int4"),
        Bad(op, int4(), f"b_scale has shape [{G}, 64, 1]; it must be [{G}, 64, 2]", "int4_g64"),
        Bad(op, int4(b_scale=torch.zeros(G, 64, 2)), f"b_scale has shape [{G}, 64, 2]; it must be [{G}, 64, 4]", "int4_g32"),
        Bad(op, int4(b_global_scale=None), "b_global_scale is missing; layout 'sm90_int4' needs one", "int4"),
        Bad(op, int4(b_global_scale=torch.ones(2)), f"b_global_scale has shape [2]; it must be [{G}]", "int4"),
        *(Bad(op, int4(a=torch.randn(M, K).to(d)), f"a has dtype {str(d)[6:]}; {reads}", "int4")
          for d in (torch.bfloat16, torch.float16, torch.float32, torch.int8)),
        Bad(op, int4(a_scale=None), "a_scale is missing; float8_e4m3fn activations need one", "int4"),
        Bad(op, int4(a=torch.zeros(M, 64, dtype=torch.float8_e4m3fn)), "a has 64 columns; b has K = 128 (padded to a multiple of 128), and they must be equal", "int4"),
        *(Bad("moe", moe_int4(a_format=f), f"a_format is '{f}'; {a_formats}", "int4_g64") for f in ("none", "int8", "nvfp4")),
        Bad("moe", moe_int4(a_format="auto", x=torch.randn(M, 72)), f"x has 72 columns; {needs} 16", "int4_g64"),
    ]  # fmt: skip


BAD = (
    Bad("quantize", {"format": "fp8"}, f"format is 'fp8'; {FORMAT_NAMES}"),
    Bad("quantize", {"x": to(torch.int32)}, f"x has dtype int32; it must be {FLOAT_NAMES}"),
    Bad("quantize", {"x": to(torch.float64)}, f"x has dtype float64; it must be {FLOAT_NAMES}"),
    Bad("quantize", {"x": lambda x: x[0, 0, 0]}, "x has 0 dimensions; it must have 1 or more"),
    Bad("quantize", {"x": cut}, f"x has K = {K - 1} (last dimension); it must be even"),
    Bad("quantize", {"global_scale": lambda _: torch.ones(2)}, f"global_scale has shape [2]; it must be [{G}]"),
    Bad("quantize", {"global_scale": lambda _: torch.ones(G).half()}, "global_scale has dtype float16; it must be float32"),
    Bad("quantize", {"global_scale": lambda _: torch.ones(G)}, "global_scale was given; format mxfp4 has no global scale", "mxfp4"),
    Bad("quantize_int8", {"x": to(torch.int8)}, f"x has dtype int8; it must be {FLOAT_NAMES}"),
    Bad("quantize_int8", {"x": lambda x: x[0, 0]}, "x has 0 dimensions; it must have 1 or more"),
    Bad("dequantize", {"format": ""}, f"format is ''; {FORMAT_NAMES}"),
    Bad("dequantize", {"layout": "x"}, f"layout is 'x'; {LAYOUT_NAMES}"),
    Bad("dequantize", {"dtype": torch.int32}, f"dtype is int32; it must be {FLOAT_NAMES} or float64"),
    Bad("dequantize", {"packed": to(torch.int32)}, "packed has dtype int32; it must be uint8 or float4_e2m1fn_x2"),
    Bad("dequantize", {"packed": lambda p: p[0, 0, 0]}, "packed has 0 dimensions; it must have 1 or more"),
    Bad("dequantize", {"block_scale": to(torch.float16)}, "block_scale has dtype float16; it must be float8_e4m3fn"),
    Bad("dequantize", {"block_scale": cut}, f"block_scale has shape [{G}, {N}, 3]; it must be [{G}, {N}, 4]"),
    Bad("dequantize", {"global_scale": None}, "global_scale is missing; format nvfp4 needs one"),
    Bad("dequantize", {"global_scale": first}, f"global_scale has shape []; it must be [{G}]"),
    *(
        bad
        for op in ("prepack", "unpack")
        for bad in (
            Bad(op, {"format": "x"}, f"format is 'x'; {FORMAT_NAMES}"),
            Bad(op, {"layout": "x"}, f"layout is 'x'; {LAYOUT_NAMES}"),
            Bad(op, {"packed": to(torch.float32)}, "packed has dtype float32; it must be uint8 or float4_e2m1fn_x2"),
            Bad(op, {"packed": lambda p: p[0, 0]}, "packed has 1 dimensions; it must have 2 or 3"),
            Bad(op, {"global_scale": None}, "global_scale is missing; format nvfp4 needs one"),
            Bad(op, {"global_scale": first}, f"global_scale has shape []; it must be [{G}]"),
            Bad(op, {"block_scale": to(torch.uint8)}, "block_scale has dtype uint8; it must be float8_e4m3fn"),
            Bad(op, {"block_scale": cut}, f"block_scale has shape [{G}, {N}, 3]; it must be [{G}, {N}, 4]"),
        )
    ),
    Bad("quantize_fp8", {"x": to(torch.float64)}, f"x has dtype float64; it must be {FLOAT_NAMES}"),
    Bad("quantize_fp8", {"x": lambda x: x[0, 0]}, "x has 0 dimensions; it must have 1 or more"),
    Bad("quantize_fp8", {"layout": "tile16"}, "layout is 'tile16'; it must be one of: plain, sm90"),
    *(bad for op in PRODUCTS for bad in matmul_cases(op)),
    *sm90_cases(),
    *int4_cases(),
    Bad("grouped_mm_k", {"offs": to(torch.int64)}, "offs has dtype int64; it must be int32"),
    Bad("grouped_mm_k", {"offs": first}, "offs has 0 dimensions; it must have 1"),
    Bad("grouped_mm", {"offs": to(torch.int64)}, "offs has dtype int64; it must be int32"),
    Bad("grouped_mm", {"offs": cut}, f"offs has shape [{G - 1}]; it must be [{G}]"),
    Bad("grouped_mm_masked", {"masked_m": to(torch.int64)}, "masked_m has dtype int64; it must be int32"),
    Bad("grouped_mm_masked", {"masked_m": cut}, f"masked_m has shape [{G - 1}]; it must be [{G}]"),
    Bad("grouped_mm_masked", {"a": lambda a: a[:2]}, f"a has 2 groups; b has {G}, and they must be equal"),
    Bad("indexed_mm", {"expert_ids": to(torch.int16)}, "expert_ids has dtype int16; it must be int32 or int64"),
    Bad("indexed_mm", {"expert_ids": cut}, f"expert_ids has shape [{M - 1}]; it must be [{M}]"),
    *weight_cases("moe", "w13"),
    *weight_cases("moe", "w2"),
    Bad("moe", {"activation": "relu"}, "activation is 'relu'; it must be one of: gelu, gelu_interleaved, gelu_tanh, gelu_tanh_interleaved, relu2, silu, silu_interleaved, situ, situ_interleaved, swigluoai, swigluoai_halves"),
    *(Bad("moe", {"activation": name}, f"activation is '{name}'; one with a gate may have brackets, and in them limit=L, L a positive number: what gate and up are clamped to") for name in BAD_LIMITS),
    Bad("moe", {"activation": "relu(limit=1)"}, "activation is 'relu(limit=1)'; it must be one of: gelu, gelu_interleaved, gelu_tanh, gelu_tanh_interleaved, relu2, silu, silu_interleaved, situ, situ_interleaved, swigluoai, swigluoai_halves"),
    Bad("moe", {"activation": "relu2"}, "w13 has 64 rows; w2 has K = 32, and w13 must have as many ('relu2' has no gate)"),
    Bad("moe", {"a_format": "int4"}, "a_format is 'int4'; it must be one of: auto, fp8, int8, mxfp4, none, nvfp4"),
    Bad("moe", {"a_format": "fp16"}, "a_format is 'fp16'; it must be one of: auto, fp8, int8, mxfp4, none, nvfp4"),
    Bad("moe", {"x": to(torch.int8)}, f"x has dtype int8; it must be {FLOAT_NAMES}"),
    Bad("moe", {"x": first}, "x has 1 dimensions; it must have 2"),
    Bad("moe", {"x": lambda x: x[:, :-2]}, f"x has {K - 2} columns; w13 has K = {K}, and they must be equal"),
    Bad("moe", {"topk_ids": to(torch.float32)}, "topk_ids has dtype float32; it must be int32 or int64"),
    Bad("moe", {"topk_ids": first}, "topk_ids has 1 dimensions; it must have 2"),
    Bad("moe", {"topk_ids": lambda t: t[:-1]}, f"topk_ids has shape [{M - 1}, 2]; it must be [{M}, 2]"),
    Bad("moe", {"topk_weights": to(torch.float64)}, f"topk_weights has dtype float64; it must be {FLOAT_NAMES}"),
    Bad("moe", {"topk_weights": cut}, f"topk_weights has shape [{M}, 1]; it must be [{M}, 2]"),
    Bad("moe", {n: (lambda t: t[:, :-2]) for n in ("w13", "w13_scale", "w13_bias")},
        "w13 has 62 rows; w2 has K = 32, and w13 must have twice that (gate and up)"),
    Bad("moe", {n: (lambda t: t[:2]) for n in ("w2", "w2_scale", "w2_global_scale", "w2_bias")},
        f"w2 has 2 experts; w13 has {G}, and they must be equal"),
    Bad("moe", {"w13_bias": cut}, f"w13_bias has shape [{G}, 63]; it must be [{G}, 64]"),
    Bad("moe", {"w2_bias": to(torch.int64)}, f"w2_bias has dtype int64; it must be {FLOAT_NAMES}"),
    Bad("moe", {"out_dtype": torch.float64}, f"out_dtype is float64; it must be {FLOAT_NAMES}"),
    Bad("moe_slots", {"w13_bias": cut}, f"w13_bias has shape [{G}, 63]; it must be [{G}, 64]"),
    Bad("moe_slots", {"slots": to(torch.int8)}, "slots has dtype int8; it must be uint8"),
    Bad("moe_slots", {"slots": lambda t: t[:-1]}, "slots has 8447 bytes; 2 slots of these weights take 8448"),
    Bad("moe_slots", {"slots": lambda t: t[None]}, "slots has 2 dimensions; it must have 1"),
    Bad("moe_slots", {"state": to(torch.int64)}, "state has dtype int64; it must be int32"),
    Bad("moe_slots", {"state": lambda t: t[None]}, "state has 2 dimensions; it must have 1"),
    Bad("moe_slots", {"state": lambda t: t[:G + 3]}, f"state has {G + 3} elements; it must have {G + 4} or more: {G} experts, 3 counters, and one for each slot"),
    Bad("moe_slots", {"state": lambda t: t.new_zeros(2000)}, f"w13 has {G} experts, and state is for {2000 - G - 3} slots; at most 1024 of each are possible"),
    Bad("offs_to_m_indices", {"offs": to(torch.int64)}, "offs has dtype int64; it must be int32"),
    Bad("offs_to_m_indices", {"offs": first}, "offs has 0 dimensions; it must have 1"),
    Bad("offs_to_m_indices", {"m": -1}, "m is -1; it must be 0 or more"),
    Bad("m_indices_to_offs", {"m_indices": to(torch.int64)}, "m_indices has dtype int64; it must be int32"),
    Bad("m_indices_to_offs", {"m_indices": first}, "m_indices has 0 dimensions; it must have 1"),
    Bad("m_indices_to_offs", {"num_groups": -2}, "num_groups is -2; it must be 0 or more"),
    Bad("to_masked", {"a": first}, "a has 1 dimensions; it must have 2"),
    Bad("to_masked", {"offs": to(torch.float32)}, "offs has dtype float32; it must be int32"),
    Bad("to_masked", {"max_m": -1}, "max_m is -1; it must be 0 or more"),
    Bad("from_masked", {"a": first}, "a has 2 dimensions; it must have 3"),
    Bad("from_masked", {"masked_m": to(torch.int64)}, "masked_m has dtype int64; it must be int32"),
    Bad("from_masked", {"masked_m": cut}, f"masked_m has shape [{G - 1}]; it must be [{G}]"),
    Bad("from_masked", {"m": -1}, "m is -1; it must be 0 or more"),
)  # fmt: skip


def mutated(bad: Bad, device: str) -> dict:
    args = good(bad.op, device, bad.case)
    for name, change in bad.changes.items():
        value = change(args[name]) if callable(change) else change
        args[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return args


def message_of(op: str, args: dict) -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(fp4, op)(**args)
    return str(caught.value).split("\n")[0]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_real_and_fake_say_the_same(bad, device):
    args = mutated(bad, device)
    meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in args.items()}
    assert message_of(bad.op, meta) == bad.message
    assert message_of(bad.op, args) == bad.message


def test_the_good_calls_are_good(device):
    for bad in BAD:
        if device == "cuda" and bad.case == "int8":
            continue
        getattr(fp4, bad.op)(**good(bad.op, device, bad.case))


# What only the data shows: an error on CPU, where looking costs nothing.
DATA = (
    Bad("grouped_mm", {"offs": torch.tensor([2, 1, 5], dtype=I32)}, r"offs .*decrease"),
    Bad("grouped_mm", {"offs": torch.tensor([2, 3, 7], dtype=I32)}, r"offs .*7.*6"),
    Bad("grouped_mm", {"offs": torch.tensor([-1, 3, 4], dtype=I32)}, r"offs .*-1"),
    Bad("grouped_mm_masked", {"masked_m": torch.tensor([2, 7, 0], dtype=I32)}, r"masked_m.*7.*6"),
    Bad(
        "grouped_mm_k",
        {"offs": torch.tensor([32, 16, 64], dtype=I32)},
        r"offs decreases from 32 to 16 at index 1",
    ),
    Bad(
        "grouped_mm_k",
        {"offs": torch.tensor([32, 96], dtype=I32)},
        r"offs is 96 at index 1; a has only 64 columns",
    ),
    Bad(
        "grouped_mm_k",
        {"offs": torch.tensor([24], dtype=I32)},
        r"offs is 24 at index 0; it must be a multiple of 16 \(a block of scales\) or 64",
    ),
    Bad("grouped_mm_k", {"offs": torch.tensor([48], dtype=I32)}, r"offs is 48 .* multiple of 32", "mxfp4"),
    Bad("grouped_mm_k", {"offs": torch.tensor([48], dtype=I32)}, r"offs is 48 .* multiple of 32", "int8"),
    Bad("grouped_mm_k", {"offs": torch.tensor([32], dtype=I32)}, r"offs is 32 .* multiple of 128", "int4"),
    Bad("grouped_mm_masked", {"masked_m": torch.tensor([2, -1, 0], dtype=I32)}, r"masked_m.*-1"),
    Bad("offs_to_m_indices", {"offs": torch.tensor([2, 1, 5], dtype=I32)}, r"offs .*decrease"),
    Bad("offs_to_m_indices", {"offs": torch.tensor([2, 3, 7], dtype=I32)}, r"offs .*7.*6"),
    Bad("m_indices_to_offs", {"m_indices": torch.tensor([0, 2, 1], dtype=I32)}, r"m_indices"),
    Bad("m_indices_to_offs", {"m_indices": torch.tensor([0, -1, 1], dtype=I32)}, r"m_indices"),
    Bad("m_indices_to_offs", {"m_indices": torch.tensor([0, 1, 3], dtype=I32)}, r"m_indices.*3"),
    Bad("to_masked", {"offs": torch.tensor([2, 1, 5], dtype=I32)}, r"offs .*decrease"),
    Bad("to_masked", {"offs": torch.tensor([5, 5, 5], dtype=I32)}, r"5.*max_m|max_m.*5"),
    Bad("from_masked", {"masked_m": torch.tensor([2, 5, 0], dtype=I32)}, r"masked_m.*5.*4"),
    Bad("from_masked", {"masked_m": torch.tensor([4, 3, 0], dtype=I32)}, r"7|masked_m"),
)


@pytest.mark.parametrize("bad", DATA, ids=str)
def test_bad_data_is_an_error_on_cpu(bad):
    text = message_of(bad.op, mutated(bad, "cpu"))
    assert re.search(bad.message, text), text


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [bad for bad in DATA if bad.case != "int8"], ids=str)
def test_bad_data_is_clamped_on_a_gpu(bad):
    """No fault, no read-back: the call returns, and the device still works after it."""
    getattr(fp4, bad.op)(**mutated(bad, "cuda"))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_int8_activations_are_refused_on_a_gpu():
    for op in ("mm", "grouped_mm", "grouped_mm_masked", "indexed_mm"):
        text = message_of(op, good(op, "cuda", "int8"))
        assert "int8" in text and "CPU" in text, text
    text = message_of("moe", {**good("moe", "cuda"), "a_format": "int8"})
    assert "int8" in text and any(w in text for w in ("mma_bf16", "Hopper GPUs have no kernel")), text


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["b", "b_scale", "b_global_scale", "offs", "bias"])
def test_a_device_mix_is_refused(name):
    args = good("grouped_mm", "cuda")
    args[name] = args[name].cpu()
    assert re.match(
        rf"({name}|a|b_scale) .*must be on one device", message_of("grouped_mm", args).replace("is on", "")
    )


def test_a_device_mix_is_refused_by_fakes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = random_weight("nvfp4", G, N, K)
    with FakeTensorMode():
        for name in ("b_scale", "b_global_scale", "offs", "bias", "a"):
            args = {
                "a": torch.empty(M, K), "b": torch.empty(w.packed.shape, dtype=torch.uint8),
                "b_scale": torch.empty(w.scale.shape, dtype=torch.float8_e4m3fn),
                "b_global_scale": torch.empty(G), "offs": torch.empty(G, dtype=I32), "bias": torch.empty(G, N),
            }  # fmt: skip
            args[name] = args[name].to("meta")
            with pytest.raises(
                RuntimeError, match=f"{name} is on meta and b on cpu; they must be on one device"
            ):
                fp4.grouped_mm(**args, format="nvfp4")
        heads, angles, cache = torch.empty(1, 2, 1, 64), torch.empty(1, 2, 64), torch.empty(1, 1, 4, 64)
        places = torch.empty((), dtype=torch.int64, device="meta")
        with pytest.raises(RuntimeError, match="start is on meta and q on cpu; they must be on one device"):
            fp4.update_cache(*[heads] * 3, *[angles] * 2, None, None, 1e-6, cache, cache, places)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"k": 0}, "k is 0; it must be between 1 and the number of experts, 5"),
        ({"k": 6}, "k is 6; it must be between 1 and the number of experts, 5"),
        ({"weight": torch.ones(5, 8)}, "weights has 8 columns; x has 16, and they must be equal"),
        ({"bias": torch.ones(4)}, r"biases has shape \[4\]; it must be \[5\]"),
        ({"norm_weight": None}, "keep_norm is True; it needs norm_weight"),
        ({"addend": torch.ones(2, 16)}, r"addend has shape \[2, 16\]; it must be \[3, 16\]"),
        ({"out_dtype": torch.int8}, "out_dtype is"),
    ],
)
def test_a_router(wrong, said, device):
    given = {
        "x": torch.ones(3, 16), "weight": torch.ones(5, 16), "bias": torch.ones(5),
        "norm_weight": torch.ones(16), "eps": 1e-6, "addend": torch.ones(3, 16), "k": 2, "keep_norm": True,
        **wrong,
    }  # fmt: skip
    on = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    for place in (device, "meta"):
        on = {name: t.to(place) if isinstance(t, torch.Tensor) else t for name, t in on.items()}
        with pytest.raises((RuntimeError, ValueError), match=said):
            fp4.router(**on)
