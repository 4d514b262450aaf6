"""Finds the place of each stored weight in a model, by transformers' own conversion rules.

For each family, transformers has rules that turn a checkpoint's tensors into its parameters
(`mlp.experts.*.gate_proj.weight` and `mlp.experts.*.up_proj.weight` -> `mlp.experts.gate_up_proj`). The rules
are written for whole weights, so they are asked with the name that a whole weight would have.

Tools that quantise split weights that a family stacks. The experts then have numbers that the family's rules
do not know. Such experts are placed by the names of their matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ..distributed.parts import Part as Distributed
from ..experts.find import Form, Plan, Refusal, form_of, is_experts, plan_of
from ..experts.names import HALVES, MATRICES, wrapper_in
from ..experts.packed import PackedWeight
from .dialects import StoredWeight
from .files import INCOMPLETE, OTHER_MODEL, PREFIXED, CheckpointError, TensorInfo
from .shared import shared_experts

_EXPERT = re.compile(r"experts\.(\d+)\.")
_NUMBERED = re.compile(r"^(.*?)(\.?experts)\.(\d+)\.(\w+?)(\.weight|\.bias|_bias|)$")
_MERGES = {"MergeModulelist", "Concatenate", "Transpose"}
"""transformers' operations that only place the experts' matrices side by side."""


_UNUSED = {r"\.[qkv]_scale$", r"\.(input|output)(_global)?_scale$"}
"""Scales of activations and of a kv cache, for which no model of transformers has a place."""


@dataclass(frozen=True)
class Target:
    """The place of a weight: a parameter, and a part of it."""

    parameter: str
    expert: int | None = None
    """The expert. None means the whole parameter."""
    half: str = ""
    """"gate" or "up" if two weights are joined along N."""
    own: bool = field(default=False, compare=False)
    """True if transformers' rules do not know the name. transformers would then not load the weight."""


Part = tuple[int | None, str]
"""Expert and half."""


@dataclass
class ExpertsPlacement:
    """One experts module and the 4-bit weights that fill it."""

    name: str
    plan: Plan | None
    """The plan with which `fp4::moe` runs it. None: the module runs its own code with `FP4Tensor`s."""
    reason: str
    """Why there is no plan."""
    form: Form
    experts: int
    """Number of experts that have weights. A module may have room for more."""
    shapes: dict[str, tuple[int, int, int]]
    """[E, N, K] of each of its two weights."""
    parts: dict[tuple[str, int | None, str], StoredWeight] = field(default_factory=dict)
    """The stored weights, by attribute, expert and half."""
    part: Distributed | None = None
    """This process's part of the experts, if it does not have all (ranks.py)."""
    also: list[str] = field(default_factory=list)
    """Other modules that hold the same weights."""


@dataclass
class DensePlacement:
    """An ordinary parameter that transformers cannot fill, and the stored tensors that fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    form: Form | None
    """Form of the experts module that it belongs to."""
    parts: dict[Part, StoredWeight | TensorInfo] = field(default_factory=dict)


@dataclass
class Placement:
    """The places of everything that transformers does not load."""

    experts: dict[str, ExpertsPlacement]
    linears: dict[str, StoredWeight]
    dense: dict[str, DensePlacement]
    """Ordinary parameters, by name."""
    left: dict[str, str]
    """Modules that are not filled with 4-bit weights, and why."""
    patterns: set[str]
    """Regular expressions for the tensors that are read here, by the files' and by transformers' names."""


class Rules:
    """Maps a weight's name to its target, with transformers' conversion rules for a model and with ours."""

    def __init__(self, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
        self._renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
        self._converters = [t for t in mapping if isinstance(t, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._state: dict[str, Any] = model.state_dict()
        # A prepared model has no tensors with these names.
        self._state |= {name: m for name, m in model.named_modules() if isinstance(m, PackedWeight)}
        self._prefix = getattr(model, "base_model_prefix", None)
        self._numbered = _Numbered(model)

    def renamed(self, name: str) -> tuple[str, str | None]:
        """Returns transformers' name for a tensor of the files, and the pattern of its conversion."""
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)

    def transposes(self, name: str) -> list[tuple[int, int]]:
        """Returns the dimensions that are swapped between the files and the model, in order."""
        _, pattern = self.renamed(name)
        operations: list[Any] = [] if pattern is None else list(self._by_pattern[pattern].operations)
        return [(o.dim0, o.dim1) for o in operations if type(o).__name__ == "Transpose"]

    def parameter(self, name: str) -> str:
        """Returns the name of the parameter that a weight fills or is a part of. Raises nothing."""
        renamed, pattern = self.renamed(name)
        numbered = self._numbered.target(renamed) if pattern is None else None
        return renamed if numbered is None else numbered.parameter

    def __call__(self, name: str) -> Target:
        renamed, pattern = self.renamed(name)
        if pattern is None:
            return self._numbered.target(renamed) or Target(renamed)
        converter, number = self._by_pattern[pattern], _EXPERT.search(name)
        operations = {type(o).__name__ for o in converter.operations}
        if number is None and operations <= {"Transpose"} and len(converter.source_patterns) == 1:
            return Target(renamed)  # a stack; its shape tells its orientation
        if not operations <= _MERGES or len(converter.source_patterns) > 2 or number is None:
            raise CheckpointError(
                f"fp4: {name} goes through {sorted(operations)}, which quantised weights cannot. Leave that "
                "layer in bf16 when you quantise"
            )
        split = len(converter.source_patterns) == 2
        half = HALVES[converter.source_patterns.index(pattern)] if split else ""
        return Target(renamed, int(number[1]), half)


def rules(model: nn.Module) -> Rules:
    """Returns a model's `Rules`."""
    return Rules(model)


def is_left_out(model: nn.Module, name: str) -> bool:
    """Returns whether the family's model leaves out a tensor that its checkpoints have: mostly of layers that
    predict further tokens.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def pattern_of(name: str) -> str:
    """Returns a regular expression for names that differ from this one only in numbers."""
    return re.sub(r"(?<=\\.)\d+(?=\\.|$)", r"\\d+", re.escape(name)) + "$"


class _Numbered:
    """Places experts that are numbered in the files, if the family's rules know them only stacked."""

    def __init__(self, model: nn.Module) -> None:
        self.forms = {name: form for name, m in model.named_modules() if (form := form_of(m))}
        self._owners: dict[str, str | None] = {}

    def target(self, name: str) -> Target | None:
        match = _NUMBERED.match(name)
        if match is None or match[4] not in MATRICES:
            return None
        owner = self._owner(match[1], match[2])
        if owner is None:
            return None
        form = self.forms[owner]
        matrix, half = MATRICES[match[4]]
        if form.gate_up == "up_proj" and matrix == "gate_up":  # no gate: up is the whole weight
            half = ""
        bias = "_bias" * ("bias" in match[5])
        attribute = form.gate_up if matrix == "gate_up" else form.down
        return Target(f"{owner}.{attribute}{bias}", int(match[3]), half, own=True)

    def _owner(self, start: str, experts: str) -> str | None:
        """Returns the experts module with that name, or the only one in the block or the layer of the
        name."""
        key = start + experts
        if key not in self._owners:
            candidates = [key]
            if key not in self.forms:
                block, layer = start, start.rpartition(".")[0]
                for place in (block, layer):
                    inside = [n for n in self.forms if n == place or n.startswith(place + ".")]
                    if place and len(inside) == 1 and re.search(r"\d", place):
                        candidates = inside
                        break
            self._owners[key] = candidates[0] if candidates[0] in self.forms else None
        return self._owners[key]


def _above(name: str) -> list[str]:
    """Returns the names of the modules around a module, without the model's own."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def place(
    model: nn.Module,
    weights: dict[str, StoredWeight],
    tensors: Iterable[TensorInfo] = (),
    requantize: str | None = None,
    fewer_layers: bool = False,
) -> Placement:
    """Finds the place of every stored weight, and a stored weight for every part of each place.

    model: as transformers builds it, not yet prepared, on any device, even meta.
    tensors: all tensors of the folder. Ordinary ones that transformers' rules do not place are placed, too.
    requantize: the format to which experts will be requantised. A module's may then have several formats.
    fewer_layers: whether the model was asked for with fewer layers than the folder has. The weights of the
        others are then left out, as transformers does with ordinary weights.

    Raises CheckpointError for weights without a place, of another shape than their place, or missing.
    """
    return _Placer(model, fewer_layers).place(weights, tensors, requantize is not None)


class _Placer:
    def __init__(self, model: nn.Module, fewer_layers: bool) -> None:
        self.model, self.target = model, rules(model)
        self.fewer_layers = fewer_layers
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.shared = shared_experts(model)
        self.result = Placement({}, {}, {}, {}, set())

    def place(self, weights: dict[str, StoredWeight], tensors: Iterable[TensorInfo], anew: bool) -> Placement:
        result = self.result
        result.patterns |= _UNUSED
        taken: set[str] = set()
        for stored in sorted(weights.values(), key=self._is_copy):
            self._stored(stored)
            taken.update(info.name for info in stored.tensors)
            taken.update(stored.name + suffix for suffix in stored.dialect.suffixes)
        for name in {_NUMBER.sub("", name): name for name in taken}.values():  # one of each pattern
            result.patterns.update((pattern_of(name), pattern_of(self.target.renamed(name)[0])))
        for info in tensors:
            if info.name in taken:
                continue
            if info.dtype.itemsize == 1 or not info.dtype.is_floating_point:
                self._no_codes(info)
            if _NUMBERED.match(info.name):
                self._ordinary(info)
        for name, placed in result.experts.items():
            _check_complete(name, placed, anew)
        for name, dense in result.dense.items():
            _check_whole(name, dense)
        for name, module in self.modules.items():
            if (is_experts(module) or form_of(module)) and self.shared.get(name, name) not in result.experts:
                result.left[name] = "its weights are not stored in 4 bits"
        return result

    def _is_copy(self, stored: StoredWeight) -> bool:
        """Returns whether a weight is stored for a module that shares another module's weights."""
        if not self.shared:
            return False
        to = self.target(stored.dialect.module_name(stored.name))
        return to.parameter.rpartition(".")[0] in self.shared

    def _stored(self, stored: StoredWeight) -> None:
        name = stored.dialect.module_name(stored.name)
        to = self.target(name)
        self.result.patterns.add(pattern_of(to.parameter))
        owner, _, attribute = to.parameter.rpartition(".")
        module = self.modules.get(owner)
        parameter = None if module is None else module._parameters.get(attribute)
        if module is None and is_left_out(self.model, name):
            self.result.left[owner] = "the model has no such layer, and its family is known to leave it out"
        elif module is None and self.fewer_layers and self._is_of_left_layer(name):
            self.result.left[owner] = "the given config has fewer layers than the folder"
        elif parameter is not None and stored.dialect.is_dense:
            self._dense(to, parameter, module, stored)
        elif isinstance(module, nn.Linear) and attribute == "weight" and to.expert is None:
            _check_shape(stored, tuple(module.weight.shape))
            self.result.linears[owner] = stored
        elif module is not None and (form := form_of(module)) is not None:
            first = self.shared.get(owner, owner)
            placed = self.result.experts.get(first)
            if placed is None:
                placed = self.result.experts[first] = _experts(first, module, form)
                placed.also = [n for n, of in self.shared.items() if of == first]
            if first == owner or (attribute, to.expert, to.half) not in placed.parts:
                _add(placed, stored, attribute, to)
        else:
            what = f"a {type(module).__name__}" if module is not None else "not in the model"
            if module is None and (why := self._why_no_place(name)):
                raise CheckpointError(f"fp4: {stored.packed} has no place in the model: {why}")
            raise CheckpointError(
                f"fp4: {stored.packed} is in {stored.dialect.format}; its place {to.parameter} is {what}, "
                "which cannot hold such weights. Leave it in bf16 when you quantise, or give the model class "
                "that has the place (load_checkpoint's model_or_config)"
            )

    def _is_of_left_layer(self, name: str) -> bool:
        """Returns whether a weight is of a layer beyond the number of layers in the model's config.

        Only the outermost list of the name counts. A list of experts that is too short is an error, even if
        it is as long as the list of layers.
        """
        short = self._short(name)
        if short is None or any(isinstance(self.modules[above], nn.ModuleList) for above in _above(short)):
            return False
        text = self.model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        return len(cast(nn.ModuleList, self.modules[short])) == getattr(text, "num_hidden_layers", None)

    def _short(self, name: str) -> str | None:
        """Returns the model's list of modules that is too short for a name, or None."""
        parts = name.split(".")
        for i in range(1, len(parts)):
            owner = self.modules.get(".".join(parts[:i]))
            if isinstance(owner, nn.ModuleList) and parts[i].isdigit() and int(parts[i]) >= len(owner):
                return ".".join(parts[:i])
        return None

    def _why_no_place(self, name: str) -> str:
        """Says whether the model has fewer layers than the files, or names without the files' prefix."""
        parts = name.split(".")
        if (short := self._short(name)) is not None:
            count = len(cast(nn.ModuleList, self.modules[short]))
            return f"{short} has only {count} modules. {OTHER_MODEL}"
        for i in range(1, len(parts) - 1):
            tail = ".".join(parts[i:])
            if self.target(tail).parameter.rpartition(".")[0] in self.modules:
                prefix = ".".join(parts[:i])
                advice = PREFIXED if wrapper_in(prefix) else OTHER_MODEL
                return f"its name begins with {prefix!r}, and the model's names do not. {advice}"
        return ""

    def _no_codes(self, info: TensorInfo) -> None:
        """Raises CheckpointError for codes that the config does not explain. transformers would treat them
        as the weight's values."""
        to = self.target(info.name)
        owner, _, attribute = to.parameter.rpartition(".")
        module = self.modules.get(owner)
        parameter = None if module is None else module._parameters.get(attribute)
        if parameter is not None and parameter.dtype.is_floating_point:
            dtype = str(info.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"fp4: {info} is {dtype}, and the folder's quantization_config does not say what that means: "
                f"no weight of its kinds is stored so. Its place, {to.parameter}, is an ordinary weight. "
                "Take the config that the tool wrote beside these files, or leave the layer in bf16 when you "
                "quantise"
            )

    def _ordinary(self, info: TensorInfo) -> None:
        """Places an unquantised bias or weight of one expert, in a family that stacks them."""
        to = self.target(info.name)
        owner, _, attribute = to.parameter.rpartition(".")
        module = self.modules.get(owner)
        parameter = None if module is None else module._parameters.get(attribute)
        if to.own and parameter is not None:
            renamed, _ = self.target.renamed(info.name)
            self.result.patterns.update(map(pattern_of, (info.name, renamed, to.parameter)))
            self._dense(to, parameter, module, info)

    def _dense(
        self, to: Target, parameter: nn.Parameter, module: nn.Module | None, source: StoredWeight | TensorInfo
    ) -> None:
        dense = self.result.dense.get(to.parameter)
        if dense is None:
            form = form_of(module) if module is not None else None
            dense = DensePlacement(tuple(parameter.shape), parameter.dtype, form)
            self.result.dense[to.parameter] = dense
        shape = _part_shape(dense, to)
        if source.shape != shape:
            info = source.packed if isinstance(source, StoredWeight) else source
            raise CheckpointError(
                f"fp4: {info} holds a weight {list(source.shape)}; the model's is {list(shape)}. "
                f"{OTHER_MODEL}"
            )
        if (to.expert, to.half) in dense.parts:
            raise CheckpointError(
                f"fp4: {source.name} is the second weight for its place in {to.parameter}. {OTHER_MODEL}"
            )
        dense.parts[to.expert, to.half] = source


def _part_shape(dense: DensePlacement, to: Target) -> tuple[int, ...]:
    """Returns the shape of one part in the files."""
    if to.expert is None:
        return dense.shape
    e, *shape = dense.shape
    if to.expert >= e:
        raise CheckpointError(
            f"fp4: {to.parameter} has {e} experts; the checkpoint has an expert {to.expert}. {OTHER_MODEL}"
        )
    if dense.form and dense.form.transposed and len(shape) == 2:
        shape.reverse()
    return (shape[0] // 2 if to.half else shape[0], *shape[1:])


def _experts(name: str, module: nn.Module, form: Form) -> ExpertsPlacement:
    p, reason = None, ""
    try:
        p = plan_of(module)
    except Refusal as refusal:
        reason = str(refusal)
    shapes = {}
    for attribute in (form.gate_up, form.down):
        e, n, k = getattr(module, attribute).shape
        shapes[attribute] = (e, k, n) if form.transposed else (e, n, k)
    return ExpertsPlacement(name, p, reason, form, min(e for e, _, _ in shapes.values()), shapes)


def _add(placed: ExpertsPlacement, stored: StoredWeight, attribute: str, to: Target) -> None:
    if attribute not in placed.shapes:
        raise CheckpointError(
            f"fp4: {stored.packed} is in 4 bits; {placed.name} has no weight {attribute}. {OTHER_MODEL}"
        )
    e, n, k = placed.shapes[attribute]
    if to.expert is None:
        shape: tuple[int, ...] = (e, n, k)
    elif to.expert < e:
        shape = (n // 2 if to.half else n, k)
    else:
        raise CheckpointError(
            f"fp4: {stored.packed} is of expert {to.expert}; the model has {e} experts. {OTHER_MODEL}"
        )
    _check_shape(stored, shape)
    key = (attribute, to.expert, to.half)
    if key in placed.parts:
        raise CheckpointError(
            f"fp4: {stored.packed} and {placed.parts[key].packed} have the same place. {OTHER_MODEL}"
        )
    placed.parts[key] = stored


def _check_shape(stored: StoredWeight, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"fp4: {stored.packed} holds a weight {list(stored.shape)}; the model's is {list(shape)}. "
            f"{OTHER_MODEL}"
        )


def _check_complete(name: str, placed: ExpertsPlacement, anew: bool) -> None:
    for attribute in placed.shapes:
        have = {key[1:] for key in placed.parts if key[0] == attribute}
        formats = {stored.dialect.format for key, stored in placed.parts.items() if key[0] == attribute}
        if len(formats) > 1 and not anew:
            raise CheckpointError(
                f"fp4: experts of {name}.{attribute} are in {' and '.join(sorted(formats))}; they must be in "
                "one format. Export them again with the same one"
            )
        if part := _missing(have, placed.experts):
            raise CheckpointError(
                f"fp4: the checkpoint has no 4-bit weight for {name}.{attribute}, expert {part[0]}"
                + f" ({part[1]})" * bool(part[1])
                + f". {INCOMPLETE}"
            )


def _check_whole(name: str, dense: DensePlacement) -> None:
    if part := _missing(set(dense.parts), dense.shape[0]):
        raise CheckpointError(
            f"fp4: the checkpoint has no weight for {name}, expert {part[0]}"
            + f" ({part[1]})" * bool(part[1])
            + f". {INCOMPLETE}"
        )


def _missing(have: set[Part], experts: int) -> Part | None:
    """Returns the first part that is missing."""
    if have == {(None, "")}:
        return None
    halves = HALVES if any(half for _, half in have) else ("",)
    return next(((e, half) for e in range(experts) for half in halves if (e, half) not in have), None)
