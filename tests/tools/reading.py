"""Checks that a loaded model has the weights of a tool's folder, in the right places.

The check compares contents, not names. Each weight of the folder must be equal to a weight of the model with
the same shape, up to the last bits of a float32, and the reverse. To check that a weight is in the right
place, it is compared with the original model: only the right weight is close to its 4-bit values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from definition import Folder, Values
from safetensors.torch import load_file
from torch import Tensor, nn

from fp4_ops.checkpoints.placement import form_of
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.tensor import FP4Tensor

EXACT = 2.5e-7
"""The largest relative error of a reciprocal and a product that are rounded to float32."""


def parts_of(model: nn.Module, split: bool = True) -> Values:
    """Returns the weights of a model's experts and linear layers as matrices [N, K]. Each expert has its
    gate, its up and its down. split: False leaves gate and up in one matrix."""
    found: Values = {}
    forms = _forms(model)
    for name, value in _weights(model).items():
        owner, _, attribute = name.rpartition(".")
        if value.dim() == 2:
            found[name] = value
            continue
        for i, matrix in enumerate(value):
            form = forms.get(owner)
            if not split or form is None or not form.gated or attribute != form.gate_up:
                found[f"{name}#{i}"] = matrix
                continue
            gate, up = (matrix[::2], matrix[1::2]) if form.interleaved else matrix.chunk(2)
            found |= {f"{name}#{i} gate": gate, f"{name}#{i} up": up}
    return found


class _Form:
    def __init__(self, gate_up: str, gated: bool, transposed: bool, interleaved: bool) -> None:
        self.gate_up, self.gated, self.transposed, self.interleaved = gate_up, gated, transposed, interleaved


def _forms(model: nn.Module) -> dict[str, _Form]:
    found = {}
    for name, module in model.named_modules():
        if recipe := module.__dict__.get("_fp4_recipe"):
            up, together = recipe.form.gate_up, getattr(module, "is_concatenated", True)
            found[name] = _Form(up, "gate" in up, False, not together)
        elif form := form_of(module):
            found[name] = _Form(form.gate_up, "gate" in form.gate_up, form.transposed, form.interleaved)
    return found


def _weights(model: nn.Module) -> Values:
    """Returns weights [N, K] or [E, N, K] by name."""
    forms, found = _forms(model), {}
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            found[name] = module.dequantize()
    for name, p in model.named_parameters():
        if p.dim() not in (2, 3) or "embed" in name:
            continue
        value = p.dequantize(torch.float32) if isinstance(p, FP4Tensor) else p.detach()
        form = forms.get(name.rpartition(".")[0])
        found[name] = value.mT if form is not None and form.transposed and value.dim() == 3 else value
    return found


def check(model: Any, original: nn.Module, path: Path, far: float = 0.25, requantized: bool = False) -> int:
    """Asserts all of this. Returns the number of matrices in 4 bits."""
    folder = Folder(path)
    report = model.hf_quantizer.report
    assert report.experts, "the tool left the experts as they were"
    four = {n for n, m in model.named_modules() if isinstance(m, PackedWeight)}
    four |= {n for n, p in model.named_parameters() if isinstance(p, FP4Tensor)}
    parts, before = parts_of(model), parts_of(original)
    assert parts.keys() == before.keys(), parts.keys() ^ before.keys()
    quantised = {name for name in parts if name.partition("#")[0] in four}
    dense = {name for name in parts if name.partition("#")[0] in report.dense}
    for name, value in parts.items():
        want = before[name].double()
        if name in quantised | dense:
            error = (value.double() - want).norm() / want.norm()
            assert 0 < error < far, (name, error.item())
        else:
            # Some tools write float16, but keep float32 for weights that the model keeps in float32.
            kept = torch.equal(value.double(), want) or torch.equal(
                value.double(), want.to(model.dtype).double()
            )
            assert kept, f"{name} is not the original's"
    for name, p in original.named_parameters():
        if p.dim() == 1:
            assert torch.equal(model.get_parameter(name).double(), p.to(model.dtype).double()), name
    if requantized:
        return len(quantised)
    stacks = any("#" in name for name in folder.of4)
    held = {n: v for n, v in parts_of(model, not stacks).items() if n.partition("#")[0] in four}
    _same_contents(folder.of4, held, bool(report.folds.rounded))
    eight = {n: v.to(model.dtype) for n, v in folder.of8.items()}
    assert not report.dense or eight
    _same_contents(eight, {n: parts[n] for n in dense}, False)
    second = path.parent / "second_opinion.safetensors"
    if second.exists():
        for name, value in load_file(second).items():
            want = folder.of4[name]
            rounded = 1e-6 if value.dtype == torch.float32 else 2**-7  # a product or two in its dtype
            error = (value.double() - want).norm()
            assert error <= rounded * want.norm(), f"the tool reads {name} otherwise"
    return len(quantised)


def _same_contents(stored: Values, held: Values, rounded: bool) -> None:
    """Asserts that each weight of one is in the other. rounded: up to the change that a fold may make."""
    by_shape: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
    for i, values in enumerate((stored, held)):
        for name, value in values.items():
            by_shape.setdefault(tuple(value.shape), ([], []))[i].append(name)
    missing = []
    for ours, theirs in by_shape.values():
        left = set(theirs)
        for name in ours:
            value = stored[name].double()
            near = (n for n in left if _close(held[n].double(), value, rounded))
            found = next(near, None)
            if found is None:
                missing.append(name)
            else:
                left.remove(found)
        missing += [f"(in the model alone) {n}" for n in left]
    assert not missing, (len(missing), sorted(missing)[:6])


def _close(got: Tensor, want: Tensor, rounded: bool) -> bool:
    if rounded:
        return bool((got - want).norm() <= want.norm() / 16)
    return bool(((got - want).abs() <= EXACT * want.abs()).all())
