"""Packs experts that are modules in a list, as in transformers 4.

The block that holds the list has its own code for routing and for the loop. Each expert therefore keeps its
Linears, and only their weights become `FP4Tensor`s. In eager mode every product is an `fp4::mm`.
backend="fp4" stacks the same weights bit for bit and turns the loop into one `fp4::moe`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..experts.find import PREPARED, TOO_NARROW, WHOLE_EXPERTS
from ..experts.zero3 import emptied
from ..meta.dtensors import split_over_processes
from ..meta.formats import INT4_FORMATS, SMALLEST_SIDE
from ..meta.layouts import preferred_layout
from ..runtime.relayout import Operands
from ..tensor import FP4Tensor

NAME = "experts"
"""Name of the attribute that holds the list of experts."""


def find_lists(model: nn.Module) -> tuple[dict[str, list[nn.Module]], dict[str, str]]:
    """Finds lists and dictionaries of modules called `experts`. Also returns why some are left alone."""
    found, refused = {}, {}
    for name, m in model.named_modules():
        if isinstance(m, nn.ModuleList | nn.ModuleDict) and name.rpartition(".")[2] == NAME and len(m) > 1:
            experts = list(m.values() if isinstance(m, nn.ModuleDict) else m)
            reason = _unlike(experts)
            if reason:
                refused[name] = reason
            else:
                found[name] = experts
    return found, refused


def _unlike(experts: list[nn.Module]) -> str:
    """Returns why these experts cannot be packed, or "" if they can. Zero experts have no weights."""
    shapes = set()
    for expert in experts:
        own = [(n, m) for n, m in expert.named_modules() if isinstance(m, nn.Linear)]
        for name, p in expert.named_parameters():
            if words := emptied(p):
                return f"{name} is {words}"
        matrices = [n for n, p in expert.named_parameters() if p.dim() > 1]
        if len(own) != len(matrices):
            return f"an expert's weights are not those of Linears: {', '.join(matrices)}"
        for name, m in own:
            if isinstance(m.weight, FP4Tensor):
                return PREPARED
            if parts := split_over_processes(m.weight):
                return f"{name}.weight is {parts}; {WHOLE_EXPERTS}"
            if m.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return f"{name}.weight is {m.weight.dtype}; it must be float32, bfloat16 or float16"
            if m.in_features % 2:
                return f"{name} has an odd number of inputs, {m.in_features}"
            if min(m.weight.shape) < SMALLEST_SIDE:
                return f"{name} is {m.out_features} x {m.in_features}; {TOO_NARROW}"
        if own:
            shapes.add(tuple((name, m.weight.shape) for name, m in own))
    if len(shapes) != 1:
        return "its experts have different shapes" if shapes else "its experts have no weights"
    return ""


def linears(name: str, experts: list[nn.Module]) -> Iterator[tuple[str, nn.Linear]]:
    """Yields every Linear of a list with the name of its weight."""
    for e, expert in enumerate(experts):
        for part, m in expert.named_modules():
            if isinstance(m, nn.Linear):
                yield f"{name}.{e}.{part}.weight", m


def summary(experts: list[nn.Module]) -> str:
    every = [[m for m in expert.modules() if isinstance(m, nn.Linear)] for expert in experts]
    sizes = " ".join(f"{m.out_features}x{m.in_features}" for m in max(every, key=len))
    return f"{len(experts)} experts as modules, {sizes}"


def put(
    linear: nn.Linear, operands: Operands, format: str, method: str = "rtn", batch_invariant: bool = False
) -> int:
    """Replaces a Linear's weight by `operands` [1, N, K] in layout plain. Returns its size in bytes."""
    (n, k), dtype = linear.weight.shape, linear.weight.dtype
    packed, block_scale, global_scale = (t[0] if t is not None and t.numel() else None for t in operands)
    assert packed is not None and block_scale is not None
    tensor = FP4Tensor(packed, block_scale, global_scale, format=format, dtype=dtype, k=k, method=method)
    # The layout that a compiled graph reads by default: from another one, it would make a copy of its own.
    # With int4 that layout needs rows in fp8, which only the graph chooses.
    layout = preferred_layout(
        packed.device.type, (n, k), dtype=dtype, format=format,
        a_format="none" if format in INT4_FORMATS else "auto", batch_invariant=batch_invariant,
    )  # fmt: skip
    tensor = tensor.prepack(layout)
    linear.weight = nn.Parameter(tensor, requires_grad=False)
    return tensor.nbytes
