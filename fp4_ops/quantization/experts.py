"""Finds the expert weights of a transformers model, and computes experts in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..experts.find import Refusal, find_experts, form_of, is_experts, plan_of
from ..experts.packed import ExpertsForm


@dataclass(frozen=True)
class ExpertsModule:
    """One experts module of a model. Its weights are gate_up [E, 2 I, H] and down [E, H, I]. Experts without
    a gate have up [E, I, H] instead of gate_up."""

    name: str
    module: Any
    form: ExpertsForm
    transposed: bool

    def weight(self, matrix: str) -> Tensor:
        """Returns the weight [E, N, K] of `matrix`, one of MATRICES."""
        stored = getattr(self.module, getattr(self.form, matrix)).detach()
        return stored.transpose(1, 2) if self.transposed else stored

    def bias(self, matrix: str) -> Tensor | None:
        return getattr(self.module, getattr(self.form, f"{matrix}_bias"), None)


MATRICES = ("gate_up", "down")


def experts_modules(model: nn.Module) -> list[ExpertsModule]:
    """Lists the modules that `prepare` would prepare, in the model's order. Raises ValueError if none."""
    found, plans, _ = find_experts(model)
    return [ExpertsModule(name, found[name], p.form, p.transposed) for name, p in plans.items()]


def stacked_experts(model: nn.Module) -> tuple[list[ExpertsModule], dict[str, str]]:
    """Lists the modules that `prepare` takes, and other stacks of experts with the reason why it does not.

    `python -m fp4_ops quantize` takes both. Raises ValueError if there are none.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    names = [n for n, m in modules.items() if is_experts(m)] or [n for n, m in modules.items() if form_of(m)]
    found, left = [], {}
    for name in names:
        try:
            p = plan_of(modules[name])
            found.append(ExpertsModule(name, modules[name], p.form, p.transposed))
        except Refusal as refusal:
            if form := form_of(modules[name]):
                left[name] = str(refusal)
                own = ExpertsForm(form.gate_up, form.down, f"{form.gate_up}_bias", f"{form.down}_bias")
                found.append(ExpertsModule(name, modules[name], own, form.transposed))
    return (found, left) if found else (experts_modules(model), {})


class Arithmetic:
    """Computes the products of an experts module in float32, without rounding. Subclasses round or record
    values."""

    def __init__(self, experts: ExpertsModule) -> None:
        self.experts = experts

    def quantize_input(self, x: Tensor) -> Tensor:
        """Returns the inputs of a product, float32 [rows, K], as the operators read them."""
        return x

    def weight(self, matrix: str, expert: int) -> Tensor:
        """Returns an expert's weight, float32 [N, K]."""
        return self.experts.weight(matrix)[expert].float()

    def product(self, matrix: str, expert: int, x: Tensor, routing: Tensor) -> Tensor:
        """Returns x [M, K] times an expert's weight. routing [M] has the tokens' routing weights."""
        return x @ self.weight(matrix, expert).T

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes `fp4::moe` with everything between the roundings in float32."""
        experts = self.experts
        tokens, top_k = top_k_index.shape
        ids, order = top_k_index.flatten().sort(stable=True)
        rows = torch.bincount(ids, minlength=len(experts.weight("down"))).tolist()
        routing = top_k_weights.flatten()[order].float()

        def multiply(matrix: str, x: Tensor) -> Tensor:
            bias, out = experts.bias(matrix), []
            for expert, (part, weights) in enumerate(zip(x.split(rows), routing.split(rows))):
                y = self.product(matrix, expert, part, weights)
                out.append(y if bias is None else y + bias[expert].float())
            return torch.cat(out)

        x = self.quantize_input(hidden_states.float())[order // top_k]
        act = experts.module._apply_gate if experts.module.has_gate else experts.module.act_fn
        h = self.quantize_input(act(multiply("gate_up", x)))
        y = multiply("down", h) * routing[:, None]
        in_order = torch.empty_like(y)
        in_order[order] = y
        return in_order.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)


@contextmanager
def computing(arithmetics: Iterable[Arithmetic]) -> Iterator[None]:
    """Makes experts modules compute by these arithmetics, as a context manager."""
    arithmetics = list(arithmetics)
    try:
        for arithmetic in arithmetics:
            arithmetic.experts.module.forward = arithmetic.forward
        yield
    finally:
        for arithmetic in arithmetics:
            arithmetic.experts.module.__dict__.pop("forward", None)
