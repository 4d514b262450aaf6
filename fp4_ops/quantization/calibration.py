"""Measures the inputs of every expert's products on calibration text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..experts.find import check_model
from .experts import MATRICES, Arithmetic, ExpertsModule, computing, experts_modules


class Calibration:
    """Second moments of the inputs of a model's expert weights, made by `calibrate`.

    If all moments fit in `max_bytes`, they are measured once. Otherwise moments are measured when they are
    asked for, for as many modules at a time as fit, and earlier moments are freed. The model must not change
    in between.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, full: bool, batch: int, max_bytes: int) -> None:
        self._model, self._tokens, self._batch = model, tokens, batch
        self._full = full
        self._moments: dict[tuple[str, str], Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        """The number of tokens that each expert of a module saw, int64 [E], after it was measured."""
        self._shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self._groups: list[list[ExpertsModule]] = []
        free = 0
        for experts in experts_modules(model):
            shapes = {(experts.name, m): _shape(experts, m, full) for m in MATRICES}
            self._shapes |= shapes
            needed = sum(4 * math.prod(shape) for shape in shapes.values())
            if needed > free:
                self._groups.append([])
                free = max(max_bytes, needed)
            self._groups[-1].append(experts)
            free -= needed
        if len(self._groups) == 1:
            self._measure(self._groups[0])

    def shape(self, name: str, matrix: str) -> tuple[int, ...]:
        """Returns the shape of `get(name, matrix)` without measuring."""
        if (name, matrix) not in self._shapes:
            raise ValueError(
                f"fp4: the calibration has no inputs of {name} ({matrix}); it must be of this model: "
                "fp4_ops.quantization.calibrate(model, windows)"
            )
        return self._shapes[name, matrix]

    def get(self, name: str, matrix: str) -> Tensor:
        """Returns the argument `calibration` of `quantize_weight` for a module's "gate_up" or "down"."""
        self.shape(name, matrix)  # raises if there is none
        if (name, matrix) not in self._moments:
            self._measure(next(g for g in self._groups if any(m.name == name for m in g)))
        return self._moments[name, matrix]

    @torch.no_grad()
    def _measure(self, group: list[ExpertsModule]) -> None:
        self._moments.clear()
        recorders = [Recorder(experts, self._full) for experts in group]
        with computing(recorders):
            batches = self._tokens.split(self._batch)
            for windows in tqdm(batches, "calibration", leave=False, disable=None):
                self._model(input_ids=windows, use_cache=False)
        for recorder in recorders:
            self.tokens[recorder.experts.name] = recorder.tokens
            for matrix in MATRICES:
                self._moments[recorder.experts.name, matrix] = recorder.moments(matrix)


def calibrate(
    model: nn.Module, tokens: Tensor, *, full: bool = True, batch: int = 8, max_bytes: int = 8 << 30
) -> Calibration:
    """Runs the model on tokens and takes the second moments of the inputs x of each expert's products.

        full: E[x x^T], float32 [experts, K, K], which "gptq" needs (Frantar et al., "GPTQ", 2022)
        else: E[x_k^2], float32 [experts, K], which "weighted" needs

    tokens: int64 [windows, length], on the model's device.
    batch: windows run at a time. A terminal shows how many have run.
    max_bytes: memory for moments. The full moments of a large model need more (2.5 GB for each layer of
        Qwen3-30B-A3B). The model then runs again for every few layers, when their moments are asked for.

    A token is weighted by its squared routing weight, because the error in the layer's output has this
    weight.
    """
    check_model(model)
    return Calibration(model, tokens, full, batch, max_bytes)


def _shape(experts: ExpertsModule, matrix: str, full: bool) -> tuple[int, ...]:
    e, _, k = experts.weight(matrix).shape
    return (e, k, k) if full else (e, k)


class Recorder(Arithmetic):
    """Computes without rounding and sums the moments."""

    def __init__(self, experts: ExpertsModule, full: bool) -> None:
        super().__init__(experts)
        self.full = full
        down = experts.weight("down")
        self.sums = {m: down.new_zeros(_shape(experts, m, full), dtype=torch.float32) for m in MATRICES}
        self.tokens = down.new_zeros(len(down), dtype=torch.int64)
        self.total = down.new_zeros(len(down), dtype=torch.float32)

    def product(self, matrix: str, expert: int, x: Tensor, routing: Tensor) -> Tensor:
        weighted = x * routing.square()[:, None]
        self.sums[matrix][expert] += weighted.T @ x if self.full else (weighted * x).sum(0)
        if matrix == "down":
            self.tokens[expert] += len(x)
            self.total[expert] += routing.square().sum()
        return super().product(matrix, expert, x, routing)

    def moments(self, matrix: str) -> Tensor:
        """Returns the means. They are zero for an expert that saw no token."""
        sums = self.sums.pop(matrix)
        total = torch.where(self.total == 0, 1.0, self.total)
        return sums.div_(total.view(-1, *[1] * (sums.dim() - 1)))
