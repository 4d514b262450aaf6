"""Computes gradients through frozen 4-bit experts, for x and the routing weights. The experts themselves get
none.

Adapters (LoRA) train layers before the experts, so gradients must pass through these (QLoRA, Dettmers
et al. 2023, section 3). The block is, for token t and its choices j with expert e = topk_ids[t, j]:

    u = x[t] @ w13[e].T + w13_bias[e],  h = act(u)
    y[t] = sum_j topk_weights[t, j] * (h @ w2[e].T + w2_bias[e])

and with g the gradient of y[t], d = g @ w2[e]:

    d topk_weights[t, j] = <d, h> + <g, w2_bias[e]>
    d x[t] = sum_j (topk_weights[t, j] * d * act'(u)) @ w13[e]

The products use the dequantised weights, a few experts at a time, and the inputs as they are: quantised
activations are treated as if they were exact (the straight-through estimator).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..meta import checks
from ..meta.formats import known_activation
from ..meta.gates import apply_gate, gate_gradient

DEQUANTIZED_BYTES = 256 * 2**20
"""Most bytes of dequantised weights that exist at one time. One expert may take more."""


class FrozenExperts(torch.autograd.Function):
    """`torch.ops.fp4.moe` with a backward. Arguments: those of the operator, options as one dict."""

    @staticmethod
    def forward(
        x: Tensor, topk_ids: Tensor, topk_weights: Tensor, options: dict[str, Any], *operands: Any
    ) -> Tensor:
        return torch.ops.fp4.moe(x, topk_ids, topk_weights, *operands, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, topk_ids, topk_weights, options, *operands = inputs
        if any(ctx.needs_input_grad[4:]):
            raise ValueError(
                "fp4: a bias of 4-bit experts requires a gradient, and experts are frozen: call "
                "requires_grad_(False) on it"
            )
        ctx.options = {name: options[name] for name in ("format", "layout", "activation")}
        ctx.save_for_backward(x, topk_ids, topk_weights, *operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, topk_ids, topk_weights, *operands = ctx.saved_tensors
        d_x, d_weights = torch.ops.fp4.moe_input_grads(
            grad, x, topk_ids, topk_weights, *operands, **ctx.options
        )
        return d_x, None, d_weights, None, *(None for _ in operands)


def moe_input_grads(
    grad: Tensor, x: Tensor, topk_ids: Tensor, topk_weights: Tensor,
    w13: Tensor, w13_scale: Tensor, w13_global_scale: Tensor | None,
    w2: Tensor, w2_scale: Tensor, w2_global_scale: Tensor | None,
    w13_bias: Tensor | None = None, w2_bias: Tensor | None = None, *,
    format: str, layout: str = "plain", activation: str = "silu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    checks.check_moe_input_grads(
        grad, x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, w13_bias, w2_bias,
    )  # fmt: skip
    act, dtype = known_activation(activation), x.dtype
    experts, (hidden, top_k) = w13.shape[0], (x.shape[1], topk_ids.shape[1])
    inner = w13.shape[1] // act.parts
    grad = grad.to(dtype)
    ids = topk_ids.reshape(-1)
    valid = (ids >= 0) & (ids < experts)  # other ids belong to no expert here and contribute nothing
    ids = torch.where(valid, ids, experts).long()
    order = ids.argsort(stable=True)
    ends = torch.bincount(ids, minlength=experts + 1)[:experts].cumsum(0, dtype=torch.int32)
    host_ends = ends.tolist()  # the one host read of a call

    # A place for each choice of each token, so that sums do not depend on the order of the experts.
    d_x = x.new_zeros(order.shape[0], hidden)
    d_weights = topk_weights.new_zeros(order.shape[0])
    weights = topk_weights.reshape(-1)
    up = (w13, w13_scale, w13_global_scale, w13_bias)
    down = (w2, w2_scale, w2_global_scale, w2_bias)
    at_once = max(1, DEQUANTIZED_BYTES // max(1, 3 * inner * hidden * dtype.itemsize))
    for first, last, start, end in _chunks(host_ends, at_once):
        places = order[start:end]
        rows = places // top_k
        groups = _Groups(ends[first:last] - start, [e - start for e in host_ends[first:last]])
        x_rows, grads = x[rows], grad[rows]
        w_up = _dequantize(up, first, last, hidden, format, dtype, layout)
        w_down = _dequantize(down, first, last, inner, format, dtype, layout)

        u = groups.products(x_rows, w_up.mT).float()
        if w13_bias is not None:
            u += w13_bias[ids[places]].float()
        h = apply_gate(u, act)
        d = groups.products(grads, w_down).float()
        d_weight = (d * h).sum(-1)
        if w2_bias is not None:
            d_weight += (grads.float() * w2_bias[ids[places]].float()).sum(-1)
        d_u = gate_gradient(u, d * weights[places].float()[:, None], act).to(dtype)
        d_x[places] = groups.products(d_u, w_up)
        d_weights[places] = d_weight.to(d_weights.dtype)
    d_x = d_x.view(*topk_ids.shape, hidden).sum(1, dtype=torch.float32).to(dtype)
    return d_x, d_weights.view_as(topk_ids)


def _chunks(ends: list[int], at_once: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields runs of `at_once` experts: first, last + 1, and the start and end of their sorted rows."""
    start = 0
    for first in range(0, len(ends), at_once):
        last = min(first + at_once, len(ends))
        end = ends[last - 1]
        if end > start:
            yield first, last, start, end
        start = end


def _dequantize(
    weight: tuple[Any, ...], first: int, last: int, k: int, format: str, dtype: torch.dtype, layout: str
) -> Tensor:
    """Returns experts first to last - 1 of a weight, [E, N, k]."""
    packed, scale, global_scale, _ = weight
    if global_scale is not None:
        global_scale = global_scale[first:last]
    values = torch.ops.fp4.dequantize(
        packed[first:last], scale[first:last], global_scale, format, dtype, layout=layout
    )
    return values[..., :k]


@dataclass(frozen=True)
class _Groups:
    """Ends of the rows of each expert, on the device and on the host."""

    ends: Tensor
    host_ends: list[int]

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns a [M, K] @ b [E, K, N], rows of `a` sorted by expert."""
        if a.is_cuda and a.dtype == torch.bfloat16 and not (a.shape[1] % 8 or b.shape[2] % 8):
            return torch.nn.functional.grouped_mm(a, b, offs=self.ends)
        out = a.new_empty(a.shape[0], b.shape[2])
        start = 0
        for e, end in enumerate(self.host_ends):
            if end > start:
                torch.mm(a[start:end], b[e], out=out[start:end])
            start = end
        return out


_LIBRARY = Library("fp4", "IMPL")
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("moe_input_grads", moe_input_grads, _device)
