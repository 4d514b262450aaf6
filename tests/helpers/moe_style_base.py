"""Defines styles: ways in which people write a Mixture-of-Experts layer without thinking of fp4_ops.

Each style is a module with input x [T, H] that routes and runs its experts. `matrices(e)` returns the weights
of expert e as writable views [N, K], in the groups in which they are quantised. So one function can make the
twin of every style.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STYLES: dict[str, type[Style]] = {}


def style(name: str) -> Callable[[type], type]:
    def add(cls: type) -> type:
        STYLES[name] = cls
        return cls

    return add


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Expert(nn.Module):
    """One expert as a module of its own, with a gate if `gated` and with biases if `bias`."""

    def __init__(self, h: int, i: int, act: Callable[..., Tensor], gated: bool, bias: bool) -> None:
        super().__init__()
        self.act = act
        self.w1 = nn.Linear(h, i, bias=bias)
        self.w3 = nn.Linear(h, i, bias=bias) if gated else None
        self.w2 = nn.Linear(i, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.w1(x))
        return self.w2(h * self.w3(x) if self.w3 is not None else h)


class Style(nn.Module):
    """The router and the sizes. A subclass holds the weights and defines `experts(x, ids, weights)`."""

    def __init__(
        self, experts: int = 6, k: int = 2, hidden: int = 32, inter: int = 48,
        act: Callable[..., Tensor] = F.silu, gated: bool = True, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.E, self.k, self.H, self.I = experts, k, hidden, inter
        self.act, self.gated, self.bias = act, gated, bias
        self.router = nn.Linear(hidden, experts, bias=False)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def matrices(self, e: int) -> list[list[Tensor]]:
        raise NotImplementedError

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(self.router(x).float(), -1), self.k)
        return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        return self.experts_of(x, ids, weights)

    def twin(self, format: str = "nvfp4") -> Style:
        """Make the same module with exactly the values of the packed weights."""
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for e in range(self.E):
                for parts in twin.matrices(e):
                    whole = torch.cat([p.detach().float() for p in parts])
                    packed = torch.ops.fp4.quantize(whole, format)
                    exact = torch.ops.fp4.dequantize(*packed, format, torch.float32)
                    for part, new in zip(parts, exact.split([p.shape[0] for p in parts])):
                        part.copy_(new)
        return twin


class ListStyle(Style):
    """A ModuleList of experts."""

    def build(self) -> None:
        make = (Expert(self.H, self.I, self.act, self.gated, self.bias) for _ in range(self.E))
        self.list = nn.ModuleList(make)

    def matrices(self, e: int) -> list[list[Tensor]]:
        x = self.list[e]
        up = [x.w1.weight.data] + ([x.w3.weight.data] if x.w3 is not None else [])
        return [up, [x.w2.weight.data]]


class StackedStyle(Style):
    """Weights in 3D parameters: w1 and w3 [E, I, H], w2 [E, H, I]."""

    def build(self) -> None:
        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)

        self.w1, self.w3 = parameter(self.E, self.I, self.H), parameter(self.E, self.I, self.H)
        self.w2 = parameter(self.E, self.H, self.I)

    def matrices(self, e: int) -> list[list[Tensor]]:
        return [[self.w1.data[e], self.w3.data[e]], [self.w2.data[e]]]

    def expert(self, e: int, x: Tensor) -> Tensor:
        return (self.act(x @ self.w1[e].T) * (x @ self.w3[e].T)) @ self.w2[e].T


class FusedStyle(Style):
    """Transposed and fused 3D parameters: w13 [E, H, 2I], w2 [E, I, H]."""

    def build(self) -> None:
        self.w13 = nn.Parameter(torch.randn(self.E, self.H, 2 * self.I) / self.H**0.5)
        self.w2 = nn.Parameter(torch.randn(self.E, self.I, self.H) / self.I**0.5)

    def matrices(self, e: int) -> list[list[Tensor]]:
        return [[self.w13.data[e].T], [self.w2.data[e].T]]

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.w13[e]).chunk(2, -1)
        return (self.act(gate) * up) @ self.w2[e]


def twin_of(module: nn.Module) -> nn.Module:
    """Make the model with the values of the packed weights in every block."""
    twin = copy.deepcopy(module)
    if isinstance(twin, Style):
        return twin.twin()
    for name, child in twin.named_children():
        setattr(twin, name, twin_of(child))
    return twin
