"""Bad calls: each names the argument and says what it must be, in the same words from fakes and kernels."""

# ruff: noqa: E501  one case a line

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
import torch
from reference import random_weight

fp4 = torch.ops.fp4

G, N, K, M = 3, 20, 64, 6
I32 = torch.int32


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
    """A good call as keyword arguments, nvfp4 unless the case says mxfp4."""
    format = "mxfp4" if case == "mxfp4" else "nvfp4"
    x = torch.randn(M, K, device=device)
    if op == "quantize":
        return {"x": torch.randn(G, N, K, device=device), "format": format, "global_scale": None}
    if op == "quantize_int8":
        return {"x": x}
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
    w = random_weight(format, *(() if op == "mm" else (G,)), N, K, device=device)
    if op == "dequantize":
        return {
            "packed": w.packed, "block_scale": w.scale, "global_scale": w.global_scale,
            "format": format, "dtype": torch.float32, "layout": "plain",
        }  # fmt: skip
    if op in ("prepack", "unpack"):
        return {"packed": w.packed, "block_scale": w.scale, "format": format, "layout": "plain"}
    a = x.expand(G, M, K).contiguous() if op == "grouped_mm_masked" else x
    a_scale = None
    if case == "int8":
        a, a_scale = fp4.quantize_int8(a)
    args = {"a": a, "b": w.packed, "b_scale": w.scale, "b_global_scale": w.global_scale}
    if op == "grouped_mm":
        args["offs"] = torch.tensor([2, 2, 5], dtype=I32, device=device)
    if op == "grouped_mm_masked":
        args["masked_m"] = torch.tensor([2, 0, 6], dtype=I32, device=device)
    if op == "indexed_mm":
        args["expert_ids"] = torch.randint(0, G, (M,), device=device)
    bias = torch.randn(*(() if op == "mm" else (G,)), N, device=device)
    return {**args, "a_scale": a_scale, "bias": bias, "format": format, "layout": "plain", "out_dtype": None}


def to(dtype):
    return lambda t: t.to(dtype)


def cut(t):
    return t[..., :-1]


def first(t):
    return t[0]


FLOAT_NAMES = "float32 or bfloat16 or float16"
FORMAT_NAMES = "it must be one of: mxfp4, nvfp4"
LAYOUT_NAMES = "it must be one of: plain, tile16"


def weight_cases(op: str, b: str, device_like: str = "") -> list[Bad]:
    """What can be wrong with a packed weight called `b`."""
    grouped = op != "mm"
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
    ]  # fmt: skip


def matmul_cases(op: str) -> list[Bad]:
    masked = op == "grouped_mm_masked"
    dim = 3 if masked else 2
    lead = f"{G}, " if masked else ""
    bias = f"[{N}]" if op == "mm" else f"[{G}, {N}]"
    shorter = f"[{N - 1}]" if op == "mm" else f"[{G}, {N - 1}]"
    return [
        Bad(op, {"format": "fp4"}, f"format is 'fp4'; {FORMAT_NAMES}"),
        Bad(op, {"layout": "tiles"}, f"layout is 'tiles'; {LAYOUT_NAMES}"),
        *weight_cases(op, "b"),
        Bad(op, {"a": to(torch.float64)}, f"a has dtype float64; it must be {FLOAT_NAMES} or int8"),
        Bad(op, {"a": first}, f"a has {dim - 1} dimensions; it must have {dim}"),
        Bad(
            op, {"a": lambda a: a[..., :-2]}, f"a has {K - 2} columns; b has K = {K}, and they must be equal"
        ),
        Bad(op, {"a": to(torch.int8)}, "a_scale is missing; int8 activations need one"),
        Bad(op, {"a_scale": lambda _: torch.ones(M, 2)}, "a_scale was given; only int8 activations have one"),
        Bad(op, {"a_scale": to(torch.float16)}, "a_scale has dtype float16; it must be float32", "int8"),
        Bad(op, {"a_scale": cut}, f"a_scale has shape [{lead}{M}, 1]; it must be [{lead}{M}, 2]", "int8"),
        Bad(op, {"bias": to(torch.int32)}, f"bias has dtype int32; it must be {FLOAT_NAMES}"),
        Bad(op, {"bias": cut}, f"bias has shape {shorter}; it must be {bias}"),
        Bad(op, {"out_dtype": torch.int8}, f"out_dtype is int8; it must be {FLOAT_NAMES}"),
        Bad(op, {"out_dtype": torch.float64}, f"out_dtype is float64; it must be {FLOAT_NAMES}"),
    ]


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
            Bad(op, {"block_scale": to(torch.uint8)}, "block_scale has dtype uint8; it must be float8_e4m3fn"),
            Bad(op, {"block_scale": cut}, f"block_scale has shape [{G}, {N}, 3]; it must be [{G}, {N}, 4]"),
        )
    ),
    *(bad for op in ("mm", "grouped_mm", "grouped_mm_masked", "indexed_mm") for bad in matmul_cases(op)),
    Bad("grouped_mm", {"offs": to(torch.int64)}, "offs has dtype int64; it must be int32"),
    Bad("grouped_mm", {"offs": cut}, f"offs has shape [{G - 1}]; it must be [{G}]"),
    Bad("grouped_mm_masked", {"masked_m": to(torch.int64)}, "masked_m has dtype int64; it must be int32"),
    Bad("grouped_mm_masked", {"masked_m": cut}, f"masked_m has shape [{G - 1}]; it must be [{G}]"),
    Bad("grouped_mm_masked", {"a": lambda a: a[:2]}, f"a has 2 groups; b has {G}, and they must be equal"),
    Bad("indexed_mm", {"expert_ids": to(torch.int16)}, "expert_ids has dtype int16; it must be int32 or int64"),
    Bad("indexed_mm", {"expert_ids": cut}, f"expert_ids has shape [{M - 1}]; it must be [{M}]"),
    *weight_cases("moe", "w13"),
    *weight_cases("moe", "w2"),
    Bad("moe", {"activation": "relu"}, "activation is 'relu'; it must be one of: gelu, gelu_tanh, silu, swigluoai"),
    Bad("moe", {"a_format": "fp8"}, "a_format is 'fp8'; it must be one of: int8, none"),
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
@pytest.mark.parametrize("bad", DATA, ids=str)
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
    assert "int8" in text and "CPU" in text, text


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
