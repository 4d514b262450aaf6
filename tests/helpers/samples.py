"""Makes random valid calls of every operator, for opcheck and for the tests of fakes and of bad inputs."""

from __future__ import annotations

import contextlib
import random

import torch
from reference import (
    ACTIVATIONS,
    BLOCK,
    FORMATS,
    FP4_FORMATS,
    GATES,
    INT4_FORMATS,
    Activations,
    random_activations,
    random_weight,
    rows_per_column,
)

from fp4_ops.meta.slot_checks import COUNTERS, slot_bytes

HOPPER_FORMATS = {"sm90": FP4_FORMATS, "mma_bf16": FP4_FORMATS, "sm90_int4": INT4_FORMATS}
"""The layouts of the Hopper kernels, each with the formats that it can hold."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
A_FORMATS = ("none", "int8", "fp8", "nvfp4", "mxfp4")
WEIGHT_OPS = ("mm", "grouped_mm", "grouped_mm_masked", "indexed_mm", "moe")


def sample(op: str, device: str = "cpu", rng: random.Random | None = None) -> tuple[tuple, dict]:
    """Return (args, kwargs) of one valid call with random shapes, dtypes and options."""
    rng = rng or random.Random(int(torch.randint(0, 2**31, ())))
    return SAMPLES[op](rng, device)


def _sizes(rng: random.Random) -> tuple[int, int]:
    return rng.choice((1, 5, 16, 33)), 2 * rng.choice((1, 8, 16, 24, 47))


def _layout(rng: random.Random, device: str) -> str:
    return rng.choice(("plain", "tile16", "tile16_invariant")) if device == "cpu" else "plain"


def _held(rng: random.Random, layout: str) -> str:
    """Return a format that the layout can hold."""
    return rng.choice(HOPPER_FORMATS.get(layout, FORMATS))


def _a(rng, device, *shape) -> Activations:
    kinds = [k for k in ACTIVATIONS if device == "cpu" or k != torch.int8]
    return random_activations(*shape, kind=rng.choice(kinds), device=device)


def _bias(rng, device, *shape):
    return rng.choice((None, torch.randn(shape, device=device).to(rng.choice(FLOATS))))


def _offs(rng, groups: int, m: int, device: str):
    return torch.tensor(sorted(rng.randint(0, m) for _ in range(groups)), dtype=torch.int32, device=device)


def _x(rng, device):
    lead = [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
    return torch.randn(*lead, _sizes(rng)[1], device=device).to(rng.choice(FLOATS))


def _matmul(rng, device, w, rows, a, bias):
    kwargs = {**w.options(), **a.options(), "out_dtype": rng.choice((None, *FLOATS))}
    rows = () if rows is None else (rows,)
    return (a.data, *w.operands(), *rows, a.scale, bias, a.global_scale), kwargs


def _mm(rng, device):
    n, k = _sizes(rng)
    w = random_weight(rng.choice(FORMATS), n, k, device=device, layout=_layout(rng, device))
    return _matmul(rng, device, w, None, _a(rng, device, rng.randint(0, 9), k), _bias(rng, device, n))


def _grouped(rng, device, kind):
    groups, m, (n, k) = rng.randint(1, 4), rng.randint(0, 9), _sizes(rng)
    w = random_weight(rng.choice(FORMATS), groups, n, k, device=device, layout=_layout(rng, device))
    if kind == "masked":
        a = _a(rng, device, groups, m, k)
        rows = torch.randint(0, m + 1, (groups,), dtype=torch.int32, device=device)
    else:
        a = _a(rng, device, m, k)
        rows = _offs(rng, groups, m, device)
    if kind == "indexed":
        dtype = rng.choice((torch.int32, torch.int64))
        rows = torch.randint(-1, groups + 1, (m,), dtype=dtype, device=device)
    return _matmul(rng, device, w, rows, a, _bias(rng, device, groups, n))


def _grouped_k(rng, device):
    format = rng.choice(FORMATS)
    block = max(32, BLOCK[format])
    n, t = rng.choice((1, 5, 16, 33)), block * rng.randint(0, 5) + rng.choice((0, 2, 18))
    w = random_weight(format, n, t, device=device, layout=_layout(rng, device))
    a = _a(rng, device, rng.randint(0, 9), t)
    ends = sorted(min(t, block * rng.randint(0, 6)) for _ in range(rng.randint(1, 4)))
    args = (a.data, *w.operands(), torch.tensor(ends, dtype=torch.int32, device=device), a.scale)
    kwargs = {**w.options(), **a.options(), "out_dtype": rng.choice((None, *FLOATS))}
    return (*args, a.global_scale), kwargs


def _moe(rng, device):
    experts, tokens, top_k = rng.randint(1, 5), rng.randint(0, 6), rng.randint(1, 3)
    hidden, inner = _sizes(rng)[1], _sizes(rng)[1]
    format, layout = rng.choice(FORMATS), _layout(rng, device)
    activation = rng.choice(GATES)
    rows = rows_per_column(activation) * inner
    w13 = random_weight(format, experts, rows, hidden, device=device, layout=layout)
    w2 = random_weight(format, experts, hidden, inner, device=device, layout=layout)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), device=device)
    args = (
        torch.randn(tokens, hidden, device=device).to(rng.choice(FLOATS)),
        ids.to(rng.choice((torch.int32, torch.int64))),
        torch.rand(tokens, top_k, device=device).to(rng.choice(FLOATS)),
        *w13.operands(),
        *w2.operands(),
        _bias(rng, device, experts, rows),
        _bias(rng, device, experts, hidden),
    )
    kwargs = {
        **w13.options(),
        "activation": activation,
        "a_format": rng.choice([f for f in A_FORMATS if device == "cpu" or f != "int8"]),
        "out_dtype": rng.choice((None, *FLOATS)),
    }
    return args, kwargs


def _moe_slots(rng, device):
    args, kwargs = _moe(rng, device)
    experts, count = args[3].shape[0], rng.randint(1, 5)
    slots = torch.zeros(slot_bytes(args[3:], count), dtype=torch.uint8, device=device)
    state = torch.zeros(experts + count + COUNTERS, dtype=torch.int32, device=device)
    state[:experts] = -1
    return (*args, slots, state), kwargs


def _moe_input_grads(rng, device):
    (x, *rest), kwargs = _moe(rng, device)
    grad = torch.randn_like(x, dtype=rng.choice(FLOATS))
    return (grad, x, *rest), {name: kwargs[name] for name in ("format", "layout", "activation")}


ALIVE: list[object] = []


def alone() -> str:
    """Return the name of a group that has only this process. A test that ends its groups ends this one,
    too."""
    from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        _resolve_process_group("alone")
        return "alone"
    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    _register_process_group("alone", group)
    ALIVE.append(group)
    return "alone"


def _moe_ep(rng, device):
    args, kwargs = _moe(rng, device)
    tokens, most = rng.choice((("own", None), ("own", args[0].shape[0] + rng.randint(0, 3)), ("same", None)))
    spread = {"tokens": tokens, "max_tokens": most, "num_experts": args[3].shape[0], "group_name": alone()}
    return args, {**kwargs, **spread}


def _packed_linears(rng, device):
    format, layout = rng.choice(list(FORMATS)), "plain"
    k, dtype = rng.choice((32, 64)), rng.choice(FLOATS)
    a = torch.randn(rng.randint(0, 3), k, device=device).to(dtype)
    rows = [rng.choice((1, 16, 24)) for _ in range(rng.randint(1, 3))]
    packed = [torch.ops.fp4.quantize(torch.randn(n, k, device=device), format) for n in rows]
    bias = [rng.choice((None, torch.randn(n, device=device).to(dtype))) for n in rows]
    b, b_scale, factor = map(list, zip(*packed))
    if format != "nvfp4":
        factor = [None] * len(rows)
    a_format = rng.choice(("none", "int8")) if device == "cpu" else "none"
    return (a, b, b_scale, factor, bias), {"format": format, "layout": layout, "a_format": a_format}


def _linears(rng, device, fp8=None):
    """`fp8`: whether the weights are in fp8. None: in one of three calls."""
    dtype, k, count = rng.choice(FLOATS), rng.choice((2, 16, 64)), rng.randint(1, 3)
    lead = [
        rng.randint(0, 4),
        rng.randint(1, 4),
    ]  # opcheck cannot copy a tensor without rows in two dimensions
    lead = rng.sample(lead, rng.randint(0, 2))

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    weights = [random(rng.choice((1, 5, 16)), k) for _ in range(count)]
    biases = [rng.choice((None, random(w.shape[0]))) for w in weights]
    norm = rng.choice((None, random(k)))
    residual = random(*lead, weights[0].shape[0]) if count == 1 and rng.random() < 0.5 else None
    options = {name: norm is not None and rng.random() < 0.5 for name in ("keep_norm", "norm_in_float")}
    addend = rng.choice((None, random(*lead, k)))
    given = random(*lead, k), weights, biases, norm, 1e-6, residual, addend
    if not (rng.random() < 1 / 3 if fp8 is None else fp8):
        return given + rng.choice(((), (None,), ([],))), options
    scales = [torch.rand(w.shape[0], device=device) + 0.1 for w in weights]
    weights[:] = [w.to(torch.float8_e4m3fn) for w in weights]
    return (*given, scales), options


def _fp8_linear(rng, device):
    (x, weights, biases, *_, scales), _ = _linears(rng, device, fp8=True)
    return (x, weights[0], scales[0], biases[0]), {}


def _top_experts(rng, device):
    experts = rng.choice((1, 5, 32, 128))
    lead = [rng.randint(0, 4), rng.randint(1, 4)][: rng.randint(0, 2)]
    logits = torch.randn(*lead, experts, device=device).to(rng.choice(FLOATS))
    options = {"softmax": rng.random() < 0.5, "normalize": rng.random() < 0.5}
    return (logits, rng.randint(1, min(experts, 8))), {**options, "out_dtype": rng.choice((None, *FLOATS))}


def _router(rng, device):
    (x, weights, biases, norm, eps, _, addend, *_), options = _linears(rng, device, fp8=False)
    options |= {"softmax": rng.random() < 0.5, "normalize": rng.random() < 0.5}
    chosen = rng.randint(1, min(weights[0].shape[0], 8))
    options["out_dtype"] = rng.choice((None, *FLOATS))
    return (x, weights[0], biases[0], norm, eps, addend, chosen), options


def _update_cache(rng, device, most_tokens=3):
    dtype, size, tokens = rng.choice(FLOATS), rng.choice((2, 64, 128)), rng.randint(1, most_tokens)
    sequences, heads, length = rng.randint(1, 3), rng.randint(1, 2), tokens + rng.randint(0, 4)

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    q, k, v = (random(sequences, tokens, n * heads, size) for n in (2, 1, 1))
    angles = [random(rng.choice((1, sequences)), tokens, size)]
    angles.append(random(*angles[0].shape))
    norms = [rng.choice((None, random(size))) for _ in range(2)]
    caches = [random(sequences, heads, length, size) for _ in range(2)]
    start = torch.tensor(rng.randint(0, length - tokens), device=device)
    return (q, k, v, *angles, *norms, 1e-6, *caches, start), {}


def _attention(rng, device):
    dtype, size, tokens = rng.choice(FLOATS), rng.choice((2, 64, 128)), rng.choice((1, 1, 3))
    sequences, heads, length = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 40)

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    caches = [random(sequences, heads, length, size) for _ in range(2)]
    mask = torch.rand(rng.choice((1, sequences)), 1, tokens, length, device=device) < 0.7
    q = random(sequences, tokens, heads * rng.choice((1, 3)), size)
    sinks = rng.choice(((), (random(q.shape[2]),)))
    return (q, *caches, rng.choice((None, mask)), 0.3, *sinks), {}


def _cached_attention(rng, device):
    given, _ = _update_cache(rng, device, most_tokens=1)
    q, keys = given[0], given[8]
    mask = torch.rand(rng.choice((1, len(q))), 1, 1, keys.shape[2], device=device) < 0.7
    sinks = rng.choice(((), (torch.randn(q.shape[2], device=device).to(q.dtype),)))
    return (*given, rng.choice((None, mask)), 0.3, *sinks), {}


def _quantize(rng, device):
    x, format = _x(rng, device), rng.choice(FORMATS)
    given = format == "nvfp4" and rng.random() < 0.3
    return (x, format, torch.rand(x.shape[:-2], device=device) + 0.5 if given else None), {}


def _dequantize(rng, device):
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 1))] + list(_sizes(rng))
    layout = _layout(rng, device)
    if device == "cpu" and rng.random() < 0.3:
        layout, shape[-2:] = rng.choice([*HOPPER_FORMATS]), [64, 16 * rng.randint(1, 9)]
    w = random_weight(_held(rng, layout), *shape, device=device, layout=layout)
    return (*w.operands(), w.format, rng.choice((*FLOATS, torch.float64))), {"layout": w.layout}


def _prepack(rng, device, undo=False):
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 1))] + list(_sizes(rng))
    layout = rng.choice((_layout(rng, device), *HOPPER_FORMATS))
    if layout in HOPPER_FORMATS:
        shape[-2:] = rng.choice((64, 128)), 16 * rng.randint(1, 9)
    held = layout if undo else "plain"
    w = random_weight(_held(rng, layout), *shape, device=device, layout=held, narrow=True)
    return (*w.operands(), w.format, layout), {}


def _quantize_fp8(rng, device):
    return (_x(rng, device),), {"layout": rng.choice(("plain", "sm90"))}


def _to_masked(rng, device):
    groups, m = rng.randint(1, 4), rng.randint(0, 9)
    a = torch.randn(m, 6, device=device).to(rng.choice(FLOATS))
    return (a, _offs(rng, groups, m, device), m + rng.randint(0, 2)), {}


def _from_masked(rng, device):
    groups, max_m = rng.randint(1, 4), rng.randint(0, 5)
    masked_m = torch.randint(0, max_m + 1, (groups,), dtype=torch.int32, device=device)
    a = torch.randn(groups, max_m, 6, device=device).to(rng.choice(FLOATS))
    return (a, masked_m, groups * max_m + rng.randint(0, 2)), {}


def _m_indices(rng, device):
    ids = sorted(rng.randrange(4) for _ in range(rng.randint(0, 9))) + [-1] * rng.randint(0, 3)
    return (torch.tensor(ids, dtype=torch.int32, device=device), 4), {}


SAMPLES = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "quantize_int8": lambda rng, device: ((_x(rng, device),), {}),
    "quantize_fp8": _quantize_fp8,
    "prepack": _prepack,
    "unpack": lambda rng, device: _prepack(rng, device, undo=True),
    "mm": _mm,
    "grouped_mm": lambda rng, device: _grouped(rng, device, "sorted"),
    "grouped_mm_masked": lambda rng, device: _grouped(rng, device, "masked"),
    "indexed_mm": lambda rng, device: _grouped(rng, device, "indexed"),
    "grouped_mm_k": _grouped_k,
    "moe": _moe,
    "moe_slots": _moe_slots,
    "moe_input_grads": _moe_input_grads,
    "linears": _linears,
    "fp8_linear": _fp8_linear,
    "packed_linears": _packed_linears,
    "attention": _attention,
    "cached_attention": _cached_attention,
    "top_experts": _top_experts,
    "router": _router,
    "update_cache": _update_cache,
    "moe_ep": _moe_ep,
    "all_reduce": lambda rng, device: ((_x(rng, device),), {"group_name": alone()}),
    "offs_to_m_indices": lambda rng, device: ((_offs(rng, rng.randint(1, 4), 9, device), 9), {}),
    "m_indices_to_offs": _m_indices,
    "to_masked": _to_masked,
    "from_masked": _from_masked,
}


TORCHS = {
    "linears": "functional.linear",
    "fp8_linear": "functional.linear",
    "update_cache": "index_copy",
    "attention": "scaled_dot_product_attention",
    "cached_attention": "index_copy",
    "top_experts": "topk",
    "router": "functional.linear",
    "all_reduce": "distributed.nn.functional.all_reduce",
    "to_masked": "index_copy",
    "from_masked": "index_copy",
}
"""The operators whose weights are not in 4 bits, or that have none, each with what torch has for it."""


def why_no_gradient(op: str) -> tuple[str, str]:
    """Return what an operator says of gradients: why it has none, and what to do."""
    if op.startswith("quantize"):
        return "it rounds", "differentiate something else"
    if op in TORCHS:
        return "it is for inference", f"compute the same with .*{TORCHS[op]}"
    return "4-bit weights are for inference", "train with the original weights"
