"""Defines `update`, which gives one weight of a model new values, in 4 bits or not, by a trainer's name
for it."""

from __future__ import annotations

import difflib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .experts.find import check_model, form_of
from .experts.names import HALVES, MATRICES, NUMBERED, WRAPPERS
from .experts.packed import PackedWeight
from .meta.dtensors import split_over_processes
from .models.expert_slots import reset_slots
from .models.fp8_linear import FP8Linear
from .models.new_weights import check, places_of, target_of, write
from .quantization.overwrite import copy_into


def update(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Gives one weight of a model new values, in place. Experts in 4 bits are quantised as by `prepare`.

    This is for trainers that send new weights to a running model. Call it once for each tensor, in any order.
    It takes every parameter and buffer, so a trainer needs no list of the weights in 4 bits.

    model: a model from `prepare`, `load_checkpoint` or `from_pretrained`, also compiled.
    name: the name of the weight before `prepare` ("model.layers.0.mlp.experts.gate_up_proj"), the name of one
        expert's matrix ("model.layers.0.mlp.experts.3.gate_proj.weight"), or the name in the family's
        checkpoints, which transformers' conversion rules know. It may contain names of wrappers
        (`_orig_mod.`, `module.`). A wrapper may have weights of its own ("n_averaged" of `AveragedModel`).
    tensor: the values, on any device, with the shape that the weight has under that name. For weights in 4
        bits float32, bfloat16 or float16, and finite.

    The weight keeps its memory, so compiled graphs and CUDA graphs see the new values. The quantisation
    method is the one given to `prepare`. If that method needs calibration, "search" is used instead, or
    "fp8_exact" if the method uses only its scales. Once all parts of an expert have arrived, its 4 bits are
    those that `prepare` would give the new model. nvfp4 has one global scale for gate and up: if one of the
    two arrives alone, a copy of it is kept until the other arrives.

    Raises ValueError, naming the weight, if the model has none of that name, or the values do not fit it. The
    weight then keeps its old values.
    """
    check_model(model)
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"fp4: update: the new values for {name} are a {type(tensor).__name__}, not a tensor"
        )
    inside = model
    while (inner := _wrapped(inside)) is not None:
        inside = inner
    with torch.inference_mode(False), torch.no_grad():
        if _update(model, name, name, tensor):
            return
        plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        renamed = _by_rules(inside, plain, tensor)
        if renamed is not None and _update(inside, name, *renamed):
            return
    names = [n for n, _ in inside.named_parameters()]
    names += [n for n, m in inside.named_modules() if isinstance(m, PackedWeight)]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    raise ValueError(
        f"fp4: update: the model has no weight {name}"
        + f"; names like it are {', '.join(alike)}" * bool(alike)
        + ". Give the name that it has in model.named_parameters() before prepare, or in its checkpoint"
    )


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Returns the module that `module` wraps, or None."""
    children = module._modules
    return next(iter(children.values())) if len(children) == 1 and WRAPPERS.issuperset(children) else None


def _without_wrappers(owner: nn.Module, parts: list[str]) -> str:
    """Returns a name without the wrappers at its start that this module does not have."""
    own = (i for i, part in enumerate(parts) if part in owner._modules or part not in WRAPPERS)
    return ".".join(parts[next(own, len(parts)) :])


def _update(model: nn.Module, given: str, name: str, tensor: Tensor) -> bool:
    """Gives the weight `name` new values. Returns False if the model has no such weight. Errors call the
    weight `given`."""
    owner, parts = model, name.split(".")
    while parts:
        child = owner._modules.get(parts[0])
        if isinstance(child, PackedWeight):
            break
        if child is not None:
            owner, parts = child, parts[1:]
        elif _held(owner, own := _without_wrappers(owner, parts)) is not None:
            parts = [own]  # it may be a wrapper's own
            break
        elif (inner := _wrapped(owner)) is not None:
            owner = inner
        elif parts[0] in WRAPPERS:  # a wrapper of the trainer's model
            parts = parts[1:]
        else:
            break
    rest = ".".join(parts)
    places = places_of(owner)
    target = target_of(places, rest)
    if target is not None:
        place = places[target.attribute]
        check(owner, place, target, given, tensor)
        write(owner, place, target, tensor)
        return True
    held = _held(owner, rest)
    held = _part_of_a_stack(owner, rest) if held is None else held
    if held is None:
        return False
    if held.shape != tensor.shape:
        raise ValueError(
            f"fp4: update: the new values for {given} have shape {list(tensor.shape)}; it must be "
            f"{list(held.shape)}"
        )
    here, there = split_over_processes(held), split_over_processes(tensor)
    if bool(here) != bool(there):
        raise ValueError(
            f"fp4: update: {given} is {here or 'a plain tensor'}, and the new values are "
            f"{there or 'a plain tensor'}; both must be the same. Use distribute_tensor of "
            "torch.distributed.tensor, or .full_tensor()"
        )
    if isinstance(owner, FP8Linear) and rest == "weight" and tensor.dtype != held.dtype:
        owner.overwrite(tensor)
        return True
    copy_into(held, tensor)
    reset_slots(owner)
    return True


def _held(owner: nn.Module, name: str) -> Tensor | None:
    """Returns a module's own parameter or buffer of that name."""
    held: Tensor | None = owner._parameters.get(name)
    return owner._buffers.get(name) if held is None else held


def _part_of_a_stack(owner: nn.Module, name: str) -> Tensor | None:
    """Returns one expert's matrix [N, K], or its gate or up, if the experts are stacked and not in 4 bits."""
    form, match = form_of(owner), NUMBERED.match(name)
    if form is None or match is None or match[2] not in MATRICES or "bias" in match[3]:
        return None
    matrix, half = MATRICES[match[2]]
    stack = owner._parameters[form.gate_up if matrix == "gate_up" else form.down]
    if stack is None or int(match[1]) >= len(stack):
        return None
    one = stack[int(match[1])]
    one = one.T if form.transposed else one
    if not half or form.gate_up == "up_proj":
        return one
    return one[HALVES.index(half) :: 2] if form.interleaved else one.chunk(2)[HALVES.index(half)]


_rules: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""transformers' conversion rules of each model. Collecting them takes long."""


def _by_rules(model: nn.Module, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """Converts a tensor of the family's checkpoints to (name, values) of the model."""
    if not hasattr(model, "base_model_prefix"):  # not a model of transformers
        return None
    from .checkpoints.placement import rules

    known = _rules.get(model)
    if known is None:
        known = _rules[model] = rules(model)
    try:
        to = known(name)
    except ValueError as error:
        raise ValueError(f"fp4: update: {error}") from None
    if to.expert is None:
        for first, second in known.transposes(name):
            tensor = tensor.transpose(first, second)
        return to.parameter, tensor
    owner, _, attribute = to.parameter.rpartition(".")
    return f"{owner}.{to.expert}.{to.half + '_proj' if to.half else attribute}.weight", tensor
