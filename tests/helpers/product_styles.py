"""Experts with other parts than gate/up, an activation and down: one layer each, a norm at the end, three
layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, INTER, E, TOP = 32, 48, 4, 2

EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "one Linear": lambda: nn.Linear(H, H),
    "Linear, ReLU": lambda: nn.Sequential(nn.Linear(H, H), nn.ReLU()),
    "three Linears": lambda: nn.Sequential(
        nn.Linear(H, INTER), nn.ReLU(), nn.Linear(INTER, INTER), nn.ReLU(), nn.Linear(INTER, H)
    ),
    "BatchNorm and Dropout (torch-rechub)": lambda: nn.Sequential(*layer(H, INTER), *layer(INTER, H)),
    "LayerNorm at the end": lambda: nn.Sequential(
        nn.Linear(H, INTER), nn.GELU(), nn.Linear(INTER, H), nn.LayerNorm(H)
    ),
    "RMSNorm of its own at the end": lambda: nn.Sequential(
        nn.Linear(H, INTER), nn.ReLU(), nn.Linear(INTER, H), nn.RMSNorm(H)
    ),
    "gated, LayerNorm at the end": lambda: Gated(),
    "a residual": lambda: Residual(),
}


def layer(k: int, n: int) -> list[nn.Module]:
    return [nn.Linear(k, n), nn.BatchNorm1d(n), nn.ReLU(), nn.Dropout(0.1)]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, INTER), nn.Linear(H, INTER), nn.Linear(INTER, H)
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(F.silu(self.gate(x)) * self.up(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, INTER), nn.Linear(INTER, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Listed(nn.Module):
    """A router and experts in a ModuleList, whose name does not contain "expert"."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.router, self.list = nn.Linear(H, E), nn.ModuleList(expert() for _ in range(E))

    def scores(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1)

    def stacked(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.list], 1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.scores(x).topk(TOP, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def twin(self) -> nn.Module:
        """Make the same model with the values of the 4-bit weights, in float64."""
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for name, weight in twin.named_parameters():
                if weight.dim() >= 2 and not name.startswith(("router", "gates", "towers")):
                    k_first = weight.dim() == 3
                    w = weight.transpose(-1, -2) if k_first else weight
                    codes = torch.ops.fp4.quantize(w.contiguous(), "mxfp4")
                    w = torch.ops.fp4.dequantize(*codes, "mxfp4", torch.float32)
                    weight.copy_(w.transpose(-1, -2) if k_first else w)
        return twin.double()


class Stack(Listed):
    """dense, stacked outputs"""

    def forward(self, x: Tensor) -> Tensor:
        return (self.scores(x)[..., None] * self.stacked(x)).sum(1)


class Bmm(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.scores(x)[:, None], self.stacked(x)).squeeze(1)


class Einsum(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("teh,te->th", self.stacked(x), self.scores(x))


class Columns(Listed):
    """Weights of the experts that topk did not choose are zero."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        full, out = torch.zeros_like(self.scores(x)).scatter(1, ids, weights), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            out = out + full[:, e, None] * expert(x)
        return out


class Where(Listed):
    """where loop"""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Added(Listed):
    """mergoo"""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


class Masked(Listed):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.scores(x).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            mask = ids == e
            out[mask] = expert(x[mask]) * weights[mask, None]
        return out


class Gates(Listed):
    """MMoE"""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__(expert)
        self.gates = nn.ModuleList(nn.Linear(H, E) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(H, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stacked(x)
        mixed = [(gate(x).softmax(-1)[..., None] * y).sum(1) for gate in self.gates]
        return torch.cat([tower(m) for tower, m in zip(self.towers, mixed)], -1)


class Extraction(Listed):
    """PLE: two levels of experts of two tasks and of both."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__(expert)
        del self.list
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.ModuleList(expert() for _ in range(2)) for _ in range(3)) for _ in range(2)
        )
        self.gates = nn.ModuleList(nn.ModuleList(nn.Linear(H, n) for n in (4, 4, 6)) for _ in range(2))

    def lists(self) -> nn.Module:
        return self.experts

    def mixed(self, weights: Tensor, y: Tensor) -> Tensor:
        return (weights[..., None] * y).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        tasks = [x, x, x]
        for experts, gates in zip(self.lists(), self.gates):
            first, second, both = ([e(x) for e in own] for x, own in zip(tasks, experts))
            read = [first + both, second + both, first + second + both]
            tasks = [
                self.mixed(gate(x).softmax(-1), torch.stack(y, 1)) for gate, x, y in zip(gates, tasks, read)
            ]
        return torch.cat(tasks[:2], -1)


class UnnamedExtraction(Extraction):
    """PLE whose parameters are not called experts: only the gates' sums say what they are."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__(expert)
        self.list_of_levels = self.experts
        del self.experts

    def lists(self) -> nn.Module:
        return self.list_of_levels

    def mixed(self, weights: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("te,teh->th", weights, y)
