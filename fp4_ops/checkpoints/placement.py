"""Which stored weight goes where in a model: transformers' own conversion rules, asked by name.

transformers keeps, for each family, the rules that turn a checkpoint's tensors into its parameters
(`mlp.experts.*.gate_proj.weight` and `mlp.experts.*.up_proj.weight` -> `mlp.experts.gate_up_proj`). They are
written for whole weights; here they are asked with the name that a whole weight would have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..find_experts import Plan, Refusal, is_experts, plan
from .dialects import StoredWeight
from .files import CheckpointError

_EXPERT = re.compile(r"experts\.(\d+)\.")
_MERGES = {"MergeModulelist", "Concatenate", "Transpose"}
"""transformers' operations that only put the experts' matrices side by side."""

HALVES = ("gate", "up")


@dataclass(frozen=True)
class Target:
    """Where transformers' rules send a weight: a parameter, and which part of it."""

    parameter: str
    expert: int | None = None
    """None: the whole parameter."""
    half: str = ""
    """"gate" or "up" where two weights are joined along N."""


@dataclass
class ExpertsPlacement:
    """One experts module and the weights that fill it."""

    name: str
    plan: Plan
    shapes: dict[str, tuple[int, int, int]]
    """[E, N, K] of each of its two weights."""
    parts: dict[tuple[str, int | None, str], StoredWeight] = field(default_factory=dict)
    """By attribute, expert and half."""


@dataclass
class Placement:
    """Where everything goes that is stored in 4 bits."""

    experts: dict[str, ExpertsPlacement]
    linears: dict[str, StoredWeight]
    left: dict[str, str]
    """Modules that 4-bit weights do not fill, and why."""


def rules(model: nn.Module) -> Callable[[str], Target]:
    """transformers' conversion rules for this model as a function from a weight's name to its target."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state: dict[str, Any] = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None)

    def target(name: str) -> Target:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if pattern is None:
            # experts that the family's own checkpoints stack, but this one numbers
            stacked = _EXPERT.sub("experts.", renamed).removesuffix(".weight")
            number = _EXPERT.search(renamed)
            if number and stacked in state:
                return Target(stacked, int(number[1]))
            return Target(renamed)
        converter, number = by_pattern[pattern], _EXPERT.search(name)
        operations = {type(o).__name__ for o in converter.operations}
        if not operations <= _MERGES or len(converter.source_patterns) > 2 or number is None:
            raise CheckpointError(
                f"fp4: {name} goes through {sorted(operations)}, which 4-bit weights cannot"
            )
        split = len(converter.source_patterns) == 2
        return Target(
            renamed, int(number[1]), HALVES[converter.source_patterns.index(pattern)] if split else ""
        )

    return target


def place(model: nn.Module, weights: dict[str, StoredWeight]) -> Placement:
    """Finds the place of every stored weight, and a stored weight for every part of each place.

    model: on any device, the meta device too; as transformers builds it, not yet prepared.
    Raises CheckpointError for weights without a place, of another shape than their place, or missing.
    """
    target = rules(model)
    modules = dict(model.named_modules())
    # Layers that predict further tokens, mostly.
    not_run: set[str] = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    result = Placement({}, {}, {})
    for stored in weights.values():
        name = stored.dialect.module_name(stored.name)
        to = target(name)
        owner, _, attribute = to.parameter.rpartition(".")
        module = modules.get(owner)
        if isinstance(module, nn.Linear) and attribute == "weight" and to.expert is None:
            _check_shape(stored, tuple(module.weight.shape))
            result.linears[owner] = stored
        elif module is not None and is_experts(module):
            placed = result.experts.get(owner)
            if placed is None:
                placed = result.experts[owner] = _experts(owner, module, stored)
            _add(placed, stored, attribute, to)
        elif module is None and any(re.search(pattern, name) for pattern in not_run):
            result.left[owner] = "the model has no such layer, and its family is known to leave it out"
        else:
            what = f"a {type(module).__name__}" if module is not None else "not in the model"
            raise CheckpointError(
                f"fp4: {stored.packed} is in 4 bits; its place {to.parameter} is {what}, "
                "which cannot hold 4-bit weights"
            )
    for name, placed in result.experts.items():
        _check_complete(name, placed)
    for name, module in modules.items():
        if is_experts(module) and name not in result.experts:
            result.left[name] = "its weights are not stored in 4 bits"
    return result


def _experts(name: str, module: nn.Module, stored: StoredWeight) -> ExpertsPlacement:
    try:
        p = plan(module)
    except Refusal as refusal:
        raise CheckpointError(
            f"fp4: {stored.packed} belongs to {name}, which cannot run in 4 bits: {refusal}"
        ) from None
    shapes = {}
    for attribute in (p.form.gate_up, p.form.down):
        e, n, k = getattr(module, attribute).shape
        shapes[attribute] = (e, k, n) if p.transposed else (e, n, k)
    return ExpertsPlacement(name, p, shapes)


def _add(placed: ExpertsPlacement, stored: StoredWeight, attribute: str, to: Target) -> None:
    if attribute not in placed.shapes:
        raise CheckpointError(f"fp4: {stored.packed} is in 4 bits; {placed.name} has no weight {attribute}")
    e, n, k = placed.shapes[attribute]
    if to.expert is None:
        shape: tuple[int, ...] = (e, n, k)
    elif to.expert < e:
        shape = (n // 2 if to.half else n, k)
    else:
        raise CheckpointError(f"fp4: {stored.packed} is of expert {to.expert}; the model has {e}")
    _check_shape(stored, shape)
    key = (attribute, to.expert, to.half)
    if key in placed.parts:
        raise CheckpointError(f"fp4: {stored.packed} and {placed.parts[key].packed} have the same place")
    placed.parts[key] = stored


def _check_shape(stored: StoredWeight, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"fp4: {stored.packed} holds a weight {list(stored.shape)}; the model's is {list(shape)}"
        )


def _check_complete(name: str, placed: ExpertsPlacement) -> None:
    for attribute, (e, _, _) in placed.shapes.items():
        have = {key[1:] for key in placed.parts if key[0] == attribute}
        if have == {(None, "")}:
            continue
        halves = HALVES if any(half for _, half in have) else ("",)
        for expert in range(e):
            for half in halves:
                if (expert, half) not in have:
                    raise CheckpointError(
                        f"fp4: the checkpoint has no 4-bit weight for {name}.{attribute}, expert {expert}"
                        + f" ({half})" * bool(half)
                    )
