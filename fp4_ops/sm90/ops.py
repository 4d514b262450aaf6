"""The operators on Hopper's layouts: which kernel runs, what lies between. Nothing here reads device memory.

Few rows an expert: decode (csrc/sm90/decode.cu), with the activations as they are; few rows at all: gemv
(csrc/sm90/gemv.cu), which does the same. Many: prefill (csrc/sm90/prefill_*.cu), of fp8 or of 16 bits. int4:
prefill, of fp8, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gates import apply_gate
from ..meta import checks
from ..meta.formats import Activation, known_activation
from . import choice, decode, gemv, int4, prefill, rows
from .choice import Product
from .decode import Routing
from .int4 import Int4Weight
from .library import available, multiprocessors

Weight = decode.Weight | Int4Weight

PREFILL = {decode.Weight: prefill, Int4Weight: int4}
"""The module whose `run` takes any number of rows of such a weight."""


def require(op: str, layout: str, device: torch.device) -> None:
    if not available(device.index):
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"fp4::{op}: layout is '{layout}', whose kernels need compute capability 9.0 and a build with "
            f"FP4_CUDA_ARCHS=90a; this is {name}. Use layout 'plain' (convert with torch.ops.fp4.unpack)"
        )


def weight(
    b: Tensor,
    b_scale: Tensor,
    b_global_scale: Tensor | None,
    bias: Tensor | None,
    w: checks.Weight,
) -> Weight:
    assert b_global_scale is not None  # both layouts have a factor
    b, b_scale, factor = b.contiguous(), b_scale.contiguous(), b_global_scale.contiguous()
    bias = _contiguous(bias)
    shape, block = (w.groups, w.n, w.k), w.format.block
    if w.layout is int4.LAYOUT:
        return Int4Weight(b, b_scale, factor, block, bias, *shape)
    return decode.Weight(b, b_scale, factor, bias, *shape, w.layout, block)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _aligned(a: Tensor) -> Tensor:
    """Rows are fetched as whole 16 bytes; a view may begin between them."""
    return a if a.data_ptr() % 16 == 0 else a.clone()


def _ordered(a: Tensor, a_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """16-bit rows as prefill takes them for weights in layout sm90: fp16, in its order."""
    half, factor = rows.to_half(a)
    return half, factor if a_scale is None else factor * a_scale


def decodes(a: Tensor, w: Weight, routing: Routing, rows: int) -> bool:
    """`rows`: those of a group where masked, else all."""
    if not isinstance(w, decode.Weight):
        return False
    product = Product(routing, w.groups, rows, w.n, w.kp, w.block)
    kernel = "w4a8" if a.dtype == torch.float8_e4m3fn else "bf16" if w.bf16 else "half"
    return choice.decodes(product, kernel, multiprocessors(a.device.index))


def block_decodes(up: Weight, down: Weight, rows: int, a_format: str, device: torch.device) -> bool:
    """`rows`: (token, expert) pairs."""
    if isinstance(up, Int4Weight) or isinstance(down, Int4Weight):
        return False
    products = tuple(Product(Routing.OFFS, w.groups, rows, w.n, w.kp, w.block) for w in (up, down))
    return choice.block_decodes(products, a_format, multiprocessors(device.index), up.bf16)


def _product(
    a: Tensor,
    a_scale: Tensor | None,
    w: Weight,
    route: Tensor | None,
    routing: Routing,
    per_group: int,
    out: Tensor,
) -> None:
    """a [M, K], sorted by expert, masked or dense, -> out [M, n]. per_group: rows of a masked group, or M."""
    if decodes(a, w, routing, per_group):
        _few(a, a_scale, w, _Routed(routing, route, None), out, max_m=per_group)
    else:
        a = _aligned(a)
        ordered = a.dtype != torch.float8_e4m3fn and not w.bf16
        if ordered:
            a, a_scale = _ordered(a, a_scale)
        # Then the last kernel launched is that pass, and made all that may be under way.
        PREFILL[type(w)].run(a, a_scale, w, route, routing, per_group, out, early=ordered)


def mm(a: Tensor, a_scale: Tensor | None, w: Weight, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty((a.shape[0], w.n), dtype=out_dtype, device=a.device)
    if out.numel():
        _product(a.contiguous(), _contiguous(a_scale), w, None, Routing.DENSE, a.shape[0], out)
    return out


def grouped_mm(a: Tensor, a_scale: Tensor | None, w: Weight, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty((a.shape[0], w.n), dtype=out_dtype, device=a.device)
    if w.groups == 0:
        return out.zero_()
    if out.numel():
        _product(a.contiguous(), _contiguous(a_scale), w, offs.contiguous(), Routing.OFFS, a.shape[0], out)
    return out


def grouped_mm_masked(
    a: Tensor, a_scale: Tensor | None, w: Weight, masked_m: Tensor, out_dtype: torch.dtype
) -> Tensor:
    groups, max_m, k = a.shape
    out = torch.empty((groups, max_m, w.n), dtype=out_dtype, device=a.device)
    if out.numel():
        flat = a.contiguous().view(groups * max_m, k)
        scale = a_scale.reshape(-1) if a_scale is not None else None
        _product(flat, scale, w, masked_m.contiguous(), Routing.MASKED, max_m, out.view(groups * max_m, w.n))
    return out


def indexed_mm(
    a: Tensor, a_scale: Tensor | None, w: Weight, expert_ids: Tensor, out_dtype: torch.dtype
) -> Tensor:
    m = a.shape[0]
    out = torch.empty((m, w.n), dtype=out_dtype, device=a.device)
    if w.groups == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    a, a_scale, ids = a.contiguous(), _contiguous(a_scale), expert_ids.contiguous()
    if decodes(a, w, Routing.IDS64, m):
        _few(a, a_scale, w, _routed(ids, w.groups), out)
        return out
    offs, sorted_rows, position = rows.route(ids, w.groups)
    order = sorted_rows.long()
    sorted_scale = a_scale[order] if a_scale is not None else None
    product = torch.empty_like(out)
    _product(a[order], sorted_scale, w, offs, Routing.OFFS, m, product)
    torch.index_select(product, 0, position, out=out)
    return out


def grouped_mm_k(
    a: Tensor, a_scale: Tensor | None, w: Weight, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """One dense product of a copy of `a` for each group, zeros outside the group's columns.

    It multiplies each group by all of K: right for every size, fast only for few rows. Groups along K come up
    in training, where weights are not in 4 bits.
    """
    groups, (m, k) = offs.numel(), a.shape
    column = torch.arange(k, device=a.device)
    if a.dtype == torch.float8_e4m3fn:  # the layout's order: block t, word 2s + q -> word, block
        column = column.view(-1, 4, 4, 4).transpose(1, 2).reshape(-1)
        a = a.view(torch.uint8)  # zero is the byte zero
    ends = offs.clamp(0, k).cummax(0).values[:, None] if groups else offs[:, None]
    begins = F.pad(ends[:-1], (0, 0, 1, 0))[:groups]
    mine = (column >= begins) & (column < ends)
    masked = torch.where(mine[:, None], a, 0).view(groups * m, k)
    if a.dtype == torch.uint8:
        masked = masked.view(torch.float8_e4m3fn)
    scale = a_scale.repeat(groups) if a_scale is not None else None
    return mm(masked, scale, w, out_dtype).view(groups, m, w.n)


class _Routed(NamedTuple):
    """Rows by expert as decode takes them; of ids, the kernel sorts few itself."""

    routing: Routing
    route: Tensor | None
    sorted_rows: Tensor | None


def _routed(ids: Tensor, groups: int) -> _Routed:
    if ids.numel() <= decode.MAX_IDS:
        return _Routed(Routing.IDS64 if ids.dtype == torch.int64 else Routing.IDS32, ids, None)
    offs, sorted_rows, _ = rows.route(ids, groups)
    return _Routed(Routing.OFFS, offs, sorted_rows)


def _decode(
    a: Tensor, a_scale: Tensor | None, w: Weight, by: _Routed, a_div: int, out: Tensor, *,
    max_m: int = 0, gate: Activation | None = None, early: bool = False,
) -> None:  # fmt: skip
    assert isinstance(w, decode.Weight)  # what `decodes` allows
    decode.run(
        a, w, by.route, by.routing, out.shape[0], out, x_scale=a_scale, sorted_rows=by.sorted_rows,
        a_div=a_div, max_m=max_m, gate=gate, early=early and by.sorted_rows is None,
    )  # fmt: skip


def _few(
    a: Tensor, a_scale: Tensor | None, w: Weight, by: _Routed, out: Tensor, *, max_m: int = 0
) -> None:  # fmt: skip
    """By gemv or decode."""
    assert isinstance(w, decode.Weight)
    product = Product(by.routing, w.groups, out.shape[0], w.n, w.kp, w.block)
    if by.sorted_rows is None and choice.gemvs(product, multiprocessors(a.device.index)):
        gemv.run(a, w, by.route, by.routing, len(out), out, x_scale=a_scale)
    else:
        _decode(a, a_scale, w, by, 1, out, max_m=max_m)


class _Rows(NamedTuple):
    """How a block's rows go into its products."""

    quantize: Callable[..., tuple[Tensor, Tensor | None]] | None
    """rows.quantize_* for this a_format, as decode or prefill takes them; None: as they are."""
    between: torch.dtype
    """What the first product leaves to be gated and quantised."""

    @classmethod
    def of(cls, a_format: str, x: torch.dtype, few: bool, bf16: bool) -> _Rows:
        if a_format == "none":
            return cls(None if few or bf16 else rows.to_half, x)
        if a_format == "fp8":
            return cls(rows.quantize_fp8, torch.bfloat16)
        to_fp4 = partial(rows.quantize_fp4, format=a_format)
        if few:
            return cls(to_fp4, torch.float32)

        def values(*args: Any, dependent: bool = False, **named: Any) -> tuple[Tensor, Tensor]:
            return to_fp4(*args, **named) if bf16 else _ordered(*to_fp4(*args, **named))

        return cls(values, torch.float32)

    def __call__(
        self, x: Tensor, gate: Activation | None = None, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of one product; the arguments are those of `rows.quantize_fp8`."""
        if self.quantize is not None:
            return self.quantize(x, gate, **named)
        if gate is None and named.get("position") is None:
            return x, None
        return rows.same(x, gate, **named), None


def moe(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, up: Weight, down: Weight, activation: str,
    a_format: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Route, gate/up, activation, down, combine. `down.bias` is added where the experts are combined."""
    tokens, top_k = topk_ids.shape
    gate = known_activation(activation)
    m, width = tokens * top_k, up.n // gate.parts
    out = torch.empty((tokens, down.n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if m == 0 or up.groups == 0 or width == 0:
        return out.zero_()
    x, ids, weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    few = block_decodes(up, down, m, a_format, x.device)
    if a_format == "auto":  # as they are while decode runs, which waits for the weights, else fp8
        a_format = "none" if few else "fp8"
    if a_format == "fp8" and x.dtype == torch.float32:
        x = x.bfloat16()
    how = _Rows.of(a_format, x.dtype, few, up.bf16)
    if few:
        _moe_decode(x, ids, weights, up, down, gate, how, out)
    else:
        y, position = _moe_sorted(x, ids, up, down._replace(bias=None), gate, how)
        rows.combine(y, position, ids, weights, down.bias, up.groups, out)
    return out


def _to_gate(h: Tensor, gate: Activation | None) -> tuple[Tensor, Activation | None]:
    """What the first product left, and the gate that the row kernels apply; torch applies others here."""
    if gate is None or rows.gates(gate):
        return h, gate
    return apply_gate(h.float(), gate).to(h.dtype), None


def _moe_decode(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Weight,
    down: Weight,
    gate: Activation,
    how: _Rows,
    out: Tensor,
) -> None:
    """Experts' outputs are one row a (token, slot) in float32, where they are not combined at once."""
    assert isinstance(up, decode.Weight) and isinstance(down, decode.Weight)
    m, top_k = ids.numel(), ids.shape[1]
    by = _routed(ids, up.groups)
    a, a_scale = how(x)
    fused = gate if gate.interleaved and rows.gates(gate) else None  # gate and up meet in one lane's sums
    h = torch.empty((m, up.n // gate.parts if fused else up.n), dtype=how.between, device=x.device)
    products = tuple(Product(by.routing, w.groups, m, w.n, w.kp, w.block) for w in (up, down))
    if choice.block_gemvs(products, top_k, multiprocessors(x.device.index)):
        gemv.run(a, up, by.route, by.routing, m, h, x_scale=a_scale, a_div=top_k, gate=fused)
        h, h_scale = how(*_to_gate(h, None if fused else gate))
        gemv.run(h, down, by.route, by.routing, m, out, x_scale=h_scale, early=True, topk_weights=weights)
        return
    _decode(a, a_scale, up, by, top_k, h, gate=fused)
    h, h_scale = how(*_to_gate(h, None if fused else gate))
    y = torch.empty((m, down.n), dtype=torch.float32, device=x.device)
    _decode(h, h_scale, down._replace(bias=None), by, 1, y, early=True)
    rows.combine(y, None, ids, weights, down.bias, up.groups, out)


def _moe_sorted(
    x: Tensor, ids: Tensor, up: Weight, down: Weight, gate: Activation, how: _Rows
) -> tuple[Tensor, Tensor]:
    """The experts' outputs sorted by expert, in bfloat16, and the position of each (token, slot)."""
    m = ids.numel()
    offs, _, position = rows.route(ids, up.groups)
    fused = gate if prefill.gates(gate, how.between) else None
    h = torch.empty((m, up.n // gate.parts if fused else up.n), dtype=how.between, device=x.device)
    y = torch.empty((m, down.n), dtype=torch.bfloat16, device=x.device)
    end = offs[-1:]  # rows of no expert are sorted last, and nothing reads them
    run = PREFILL[type(up)].run
    ready = how(x, position=position, end=end, dependent=True)
    run(*ready, up, offs, Routing.OFFS, m, h, gate=fused, early=True)
    ready = how(*_to_gate(h, None if fused else gate), end=end, dependent=True)
    run(*ready, down, offs, Routing.OFFS, m, y, early=True)
    return y, position
