"""The gated activations of fp4::moe in plain torch, as meta.formats.Activation defines them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .meta.formats import Activation

_CURVES = {
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def apply_gate(x: Tensor, activation: Activation) -> Tensor:
    """f(gate) * (up + up_offset) in plain torch, as meta.formats.Activation defines it."""
    gate, up = (x[..., ::2], x[..., 1::2]) if activation.interleaved else x.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    curve = _CURVES.get(activation.function, lambda gate: gate * torch.sigmoid(activation.alpha * gate))
    return curve(gate) * (up + activation.up_offset)


def gate_gradient(u: Tensor, grad: Tensor, act: Activation) -> Tensor:
    """The gradient of apply_gate(u, act) with respect to u, for a gradient `grad` of its result."""
    raw_gate, raw_up = (u[..., ::2], u[..., 1::2]) if act.interleaved else u.chunk(2, dim=-1)
    gate, up = raw_gate, raw_up
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    if act.function == "silu":
        s = torch.sigmoid(act.alpha * gate)
        curve, slope = gate * s, s * (1 + act.alpha * gate * (1 - s))
    else:
        approximate = "tanh" if act.function == "gelu_tanh" else "none"
        curve = F.gelu(gate, approximate=approximate)
        slope = torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate=approximate)
    d_gate, d_up = grad * (up + act.up_offset) * slope, grad * curve
    if act.limit is not None:
        d_gate, d_up = d_gate * (raw_gate <= act.limit), d_up * (raw_up.abs() <= act.limit)
    return torch.stack((d_gate, d_up), -1).flatten(-2) if act.interleaved else torch.cat((d_gate, d_up), -1)
