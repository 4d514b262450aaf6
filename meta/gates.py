"""Computes the activations of fp4::moe in plain torch, as meta.formats.Activation defines them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import Activation

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def apply_gate(x: Tensor, activation: Activation) -> Tensor:
    """Returns f(gate) * (up + up_offset), or f(up) without gate (meta.formats.Activation)."""
    if not activation.gated:
        return _curve(x, activation)
    gate, up = (x[..., ::2], x[..., 1::2]) if activation.interleaved else x.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.caps is not None:
        up = _capped(up, activation.caps[1])
    return _curve(gate, activation) * (up + activation.up_offset)


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _curve(x: Tensor, activation: Activation) -> Tensor:
    """Returns f(x)."""
    if activation.function == "relu2":
        return F.relu(x).square()
    if activation.function == "silu":
        return x * torch.sigmoid(activation.alpha * x)
    if activation.caps is not None:
        return _capped(x, activation.caps[0]) * torch.sigmoid(x)
    return F.gelu(x, approximate=_APPROXIMATE[activation.function])


def _slope(x: Tensor, activation: Activation) -> Tensor:
    """Returns f'(x)."""
    if activation.function == "relu2":
        return 2 * F.relu(x)
    if activation.function == "silu":
        s = torch.sigmoid(activation.alpha * x)
        return s * (1 + activation.alpha * x * (1 - s))
    if activation.caps is not None:
        s, cap = torch.sigmoid(x), activation.caps[0]
        return s * (1 - torch.tanh(x / cap).square()) + _capped(x, cap) * s * (1 - s)
    approximate = _APPROXIMATE[activation.function]
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


def gate_gradient(u: Tensor, grad: Tensor, act: Activation) -> Tensor:
    """Returns the gradient of apply_gate(u, act) with respect to u, given the gradient of its result."""
    if not act.gated:
        return grad * _slope(u, act)
    raw_gate, raw_up = (u[..., ::2], u[..., 1::2]) if act.interleaved else u.chunk(2, dim=-1)
    gate, up = raw_gate, raw_up
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    d_up = grad * _curve(gate, act)
    if act.caps is not None:
        d_up, up = d_up * (1 - torch.tanh(up / act.caps[1]).square()), _capped(up, act.caps[1])
    d_gate = grad * (up + act.up_offset) * _slope(gate, act)
    if act.limit is not None:
        d_gate, d_up = d_gate * (raw_gate <= act.limit), d_up * (raw_up.abs() <= act.limit)
    return torch.stack((d_gate, d_up), -1).flatten(-2) if act.interleaved else torch.cat((d_gate, d_up), -1)
