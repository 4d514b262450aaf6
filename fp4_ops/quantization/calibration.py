"""What calibration text says about the inputs of every expert's products."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .experts import MATRICES, Arithmetic, ExpertsModule, computing, experts_modules


class Calibration:
    """Second moments of the inputs of expert weights, by name of the experts module and matrix."""

    def __init__(self, moments: dict[tuple[str, str], Tensor], tokens: dict[str, Tensor]) -> None:
        self.moments = moments
        self.tokens = tokens
        """How many tokens each expert of a module saw, int64 [E]."""

    def get(self, name: str, matrix: str) -> Tensor:
        """The argument `calibration` of `quantize_weight` for a module's "gate_up" or "down"."""
        if (name, matrix) not in self.moments:
            raise ValueError(f"fp4: the calibration says nothing about {name} ({matrix})")
        return self.moments[name, matrix]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    tokens: Tensor,
    *,
    full: bool = True,
    names: Collection[str] | None = None,
    batch: int = 8,
) -> Calibration:
    """Runs the model on tokens (int64 [windows, length]) and takes the moments of what its experts are given.

    full: E[x x^T], float32 [E, K, K], which "gptq" needs; otherwise E[x_k^2], [E, K], for "weighted".
    names: the experts modules to look at; by default all. The full moments of a large model do not fit in
        memory together (2.5 GB for one layer of Qwen3-30B-A3B): take some layers at a time.

    A token counts by its routing weight squared, as its error does in what the layer puts out.
    """
    recorders = [_Recorder(m, full) for m in experts_modules(model) if names is None or m.name in names]
    with computing(recorders):
        for windows in tokens.split(batch):
            model(input_ids=windows)
    moments = {(r.experts.name, matrix): r.moments(matrix) for r in recorders for matrix in MATRICES}
    return Calibration(moments, {r.experts.name: r.tokens for r in recorders})


class _Recorder(Arithmetic):
    """Computes without rounding and sums the moments."""

    def __init__(self, experts: ExpertsModule, full: bool) -> None:
        super().__init__(experts)
        self.full = full
        self.sums: dict[str, Tensor] = {}
        for matrix in MATRICES:
            weight = experts.weight(matrix)
            e, _, k = weight.shape
            self.sums[matrix] = torch.zeros((e, k, k) if full else (e, k), device=weight.device)
        self.tokens = torch.zeros(e, dtype=torch.int64, device=weight.device)
        self.total = torch.zeros(e, device=weight.device)

    def product(self, matrix: str, expert: int, x: Tensor, routing: Tensor) -> Tensor:
        weighted = x * routing.square()[:, None]
        self.sums[matrix][expert] += weighted.T @ x if self.full else (weighted * x).sum(0)
        if matrix == "down":
            self.tokens[expert] += len(x)
            self.total[expert] += routing.square().sum()
        return super().product(matrix, expert, x, routing)

    def moments(self, matrix: str) -> Tensor:
        """The means; zeros for an expert that saw no token."""
        sums = self.sums[matrix]
        total = torch.where(self.total == 0, 1.0, self.total)
        return sums / total.view(-1, *[1] * (sums.dim() - 1))
