"""Gives experts in 4 bits new 16-bit or 32-bit values, by the names that they had before `prepare`.

The values may be stacked (`experts.gate_up_proj`), or one tensor for each expert
(`experts.3.gate_proj.weight`). They may come in any order, and not all need to come. They are quantised in
the same way as by `prepare`, into the memory of the old values.

nvfp4 has one global scale for gate and up of an expert. If one of them arrives alone, it is quantised at
once, and its values are kept until the other arrives. Then both are quantised together, as `prepare` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.parts import Part
from ..experts.find import form_of
from ..experts.names import HALVES, MATRICES, NUMBERED
from ..experts.packed import Half, PackedWeight
from ..meta.formats import FORMATS, known_activation
from ..quantization.overwrite import LARGEST, Codes, check_memory, check_values, copy_into
from ..tensor import FP4Tensor
from .expert_slots import reset_slots


@dataclass(frozen=True)
class Target:
    """The destination of new values within an experts module."""

    attribute: str
    expert: int | None = None
    """The expert. None means all of them, stacked."""
    half: str = ""
    """"gate" or "up"; "" for a whole matrix."""
    bias: bool = False


@dataclass(frozen=True)
class Place:
    """One weight of an experts module, [E, N, K] in 4 bits."""

    holder: nn.Module
    """The owner of waiting halves: the PackedWeight, or the module that holds an FP4Tensor."""
    codes: Codes
    up: bool
    """True for gate_up or up, False for down."""
    gated: bool
    """True if it holds gate and up."""
    alternating: bool
    """True if the model keeps gate 0, up 0, gate 1, ... instead of all gates before all ups."""
    transposed: bool
    """True if stacked values are [E, K, N]."""
    part: Part | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape [E, N, K] of all processes together."""
        e, n, k = *self.codes.packed.shape[:2], self.codes.k
        if self.part is None:
            return e, n, k
        size = self.part.size if self.part.kind == "split" else 1
        return self.part.experts, n * size if self.up else n, k if self.up else k * size

    def rows(self, half: str) -> slice:
        """Returns the rows of gate or of up, in the model's order."""
        i, n = HALVES.index(half), self.codes.packed.shape[1]
        return slice(i, None, 2) if self.alternating else slice(i * (n // 2), (i + 1) * (n // 2))

    def own(self, values: Tensor, half: bool = False) -> Tensor:
        """Returns this process's part of whole matrices [n, N, K], or of gates or ups [n, N / 2, K]."""
        if self.part is None or self.part.kind != "split":
            return values
        if not self.up:
            mine = self.part.own_columns(self.shape[2])
            return values[:, :, mine.start : mine.stop]
        pieces = values.chunk(2, 1) if self.gated and not half else (values,)
        mine = self.part.own_columns(pieces[0].shape[1])
        return torch.cat([piece[:, mine.start : mine.stop] for piece in pieces], 1)

    def index(self, expert: int) -> int | None:
        """Returns the index of an expert on this process. None if another process has it."""
        if self.part is None:
            return expert
        return expert - self.part.own.start if expert in self.part.own else None

    def factors(self, largest: Tensor) -> Tensor | None:
        """Returns global scales if other processes have the rest of the matrix. None: the operator
        computes them."""
        if self.part is None or self.part.kind != "split" or not FORMATS[self.codes.format].has_global_scale:
            return None
        return torch.where(largest == 0, 1.0, largest / LARGEST)

    def join(self, halves: dict[str, Tensor]) -> Tensor:
        """Joins gate and up [N / 2, K] to one matrix [N, K], with rows in the model's order."""
        gate, up = (halves[half].to(self.codes.packed.device) for half in HALVES)
        dtype = torch.promote_types(gate.dtype, up.dtype)
        pair = torch.stack([gate.to(dtype), up.to(dtype)], 1 if self.alternating else 0)
        return pair.flatten(0, 1)

    def write_stack(self, values: Tensor) -> None:
        """Writes values [E, N, K], or in the order in which the model stores them."""
        if self.part is not None and len(values) != self.codes.packed.shape[0]:
            values = values[self.part.own.start : self.part.own.stop]
        matrices = values.transpose(1, 2) if self.transposed else values
        if self.part is not None and self.part.kind == "split":
            for i, matrix in enumerate(matrices):
                self.write(i, matrix)
        else:
            self.codes.overwrite(slice(0, len(matrices)), matrices)
        self.holder.__dict__.pop("_halves", None)

    def write(self, i: int, matrix: Tensor) -> None:
        """Writes a whole matrix [N, K] of the expert at index i."""
        values = matrix[None].to(self.codes.packed.device)
        split = self.part is not None and self.part.kind == "split"
        factors = self.factors(values.abs().amax((1, 2)).float()) if split else None
        self.codes.overwrite(slice(i, i + 1), self.own(values), factors)
        self._forget(i)

    def write_half(self, i: int, half: str, rows: Tensor) -> None:
        """Writes the gate or the up [N / 2, K] of the expert at index i."""
        values = rows[None].to(self.codes.packed.device)
        largest = values.abs().amax((1, 2)).float()
        own = self.own(values, half=True)[0]
        if not self.codes.joint:
            self.codes.overwrite_rows(i, self.rows(half), own, largest)
            return
        waiting: dict[int, dict[str, Half]] = self.holder.__dict__.setdefault("_halves", {})
        halves, other_half = waiting.setdefault(i, {}), HALVES[half == HALVES[0]]
        other = halves.pop(other_half, None)
        new = Half(own.detach().clone(memory_format=torch.contiguous_format), largest)
        halves[half] = new
        if other is None:
            self.codes.overwrite_rows(i, self.rows(half), own, largest)
            return
        whole = self.join({half: own, other_half: other.rows})
        factors = self.factors(torch.maximum(largest, other.largest.to(largest.device)))
        self.codes.overwrite(slice(i, i + 1), whole[None], factors)
        if other.state == "waiting":
            self._forget(i)
        elif other.state == "read":
            new.state = "kept"

    def _forget(self, i: int) -> None:
        waiting = self.holder.__dict__.get("_halves")
        if waiting is not None:
            waiting.pop(i, None)
            if not waiting:
                del self.holder.__dict__["_halves"]


def places_of(module: nn.Module) -> dict[str, Place]:
    """Returns the 4-bit weights of an experts module by attribute. Empty for any other module."""
    recipe, found = getattr(module, "_fp4_recipe", None), {}
    if recipe is not None:
        for matrix, attribute in recipe.form.weights:
            weight = module._modules.get(attribute)
            if isinstance(weight, PackedWeight):
                activation = known_activation(recipe.gate)
                codes = Codes(
                    weight.packed, weight.block_scale, weight.global_scale, weight.format, weight.layout,
                    weight.k, weight.interleaved, weight.method,
                )  # fmt: skip
                up = matrix == "gate_up"
                found[attribute] = Place(
                    weight, codes, up, up and activation.gated, activation.interleaved,
                    bool(getattr(module, "is_transposed", False)), weight.part,
                )  # fmt: skip
        return found
    form = form_of(module)
    for attribute in (form.gate_up, form.down) if form is not None else ():
        stack = module._parameters[attribute]
        if isinstance(stack, FP4Tensor):
            codes = Codes(*stack._held(), stack.format, stack.weight_layout, stack.k, method=stack.method)
            up = attribute == form.gate_up
            gated = attribute == "gate_up_proj"
            found[attribute] = Place(module, codes, up, gated, form.interleaved, stack.transposed, None)
    return found


def target_of(places: dict[str, Place], name: str) -> Target | None:
    """Returns the destination of values with this name within an experts module. None if it has no such
    4-bit weight."""
    if not places:
        return None
    if name.removesuffix(".weight") in places:
        return Target(name.removesuffix(".weight"))
    match = NUMBERED.match(name)
    if match is None or match[2] not in MATRICES:
        return None
    matrix, half = MATRICES[match[2]]
    attribute = next((a for a, p in places.items() if p.up == (matrix == "gate_up")), None)
    if attribute is None:
        return None
    if not places[attribute].gated:  # up is the whole weight
        half = ""
    return Target(attribute, int(match[1]), half, "bias" in match[3])


def check(module: nn.Module, place: Place, target: Target, name: str, values: Tensor) -> None:
    """Raises ValueError, naming the weight, if these values cannot be quantised into it."""
    check_memory(name, place.codes.packed)
    if isinstance(values, FP4Tensor):
        raise ValueError(
            f"fp4: the new values for {name} are an FP4Tensor; give the values before they were quantised, "
            "or load a state dict of a prepared model"
        )
    e, n, k = place.shape
    if target.expert is not None and target.expert >= e:
        raise ValueError(f"fp4: the new values for {name} are of expert {target.expert}; the model has {e}")
    if target.bias:
        bias = getattr(module, f"{target.attribute}_bias", None)
        if bias is None:
            raise ValueError(f"fp4: the new values for {name} are a bias; the experts have none")
        wanted: list[tuple[int, ...]] = [(n // 2 if target.half else n,)]
    elif target.expert is None:
        experts = {e, place.codes.packed.shape[0]}
        wanted = [(e, k, n) if place.transposed else (e, n, k) for e in sorted(experts, reverse=True)]
    else:
        wanted = [(n // 2 if target.half else n, k)]
    if tuple(values.shape) not in wanted:
        raise ValueError(
            f"fp4: the new values for {name} have shape {list(values.shape)}; it must be {list(wanted[0])}"
        )
    check_values(name, values)


def write(module: nn.Module, place: Place, target: Target, values: Tensor) -> None:
    """Quantises checked values into their place."""
    reset_slots(module)
    if target.expert is None:
        place.write_stack(values)
        return
    i = place.index(target.expert)
    if i is None:
        return
    if target.bias:
        bias = getattr(module, f"{target.attribute}_bias")[i]
        copy_into(bias[place.rows(target.half)] if target.half else bias, values)
    elif target.half:
        place.write_half(i, target.half, values)
    else:
        place.write(i, values)


def take_new_weights(module: nn.Module) -> None:
    """Makes `load_state_dict` and assignments of a 4-bit experts module quantise new values into place."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _take for hook in hooks):
        module.register_load_state_dict_pre_hook(_take)
    cls = type(module)
    if not hasattr(cls.__setattr__, "_fp4"):
        cls.__setattr__ = _quantising(cls.__setattr__)  # type: ignore[assignment, method-assign]


def _quantising(setter: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """Wraps `__setattr__` of a class of experts. nn.Module would put an assigned parameter in the place of a
    PackedWeight, and 4-bit experts would have lost a weight."""

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and isinstance(
            self.__dict__.get("_modules", {}).get(name), PackedWeight
        ):
            place, target = places_of(self).get(name), Target(name)
            if place is not None:
                with torch.inference_mode(False), torch.no_grad():
                    check(self, place, target, f"{type(self).__name__}.{name}", value)
                    write(self, place, target, value.detach())
                return
        setter(self, name, value)

    __setattr__._fp4 = True  # type: ignore[attr-defined]
    return functools.wraps(setter)(__setattr__)


def _take(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Quantises the values for 4-bit weights, and removes them from the state dict before torch reads it."""
    places = places_of(module)
    if any(name.startswith(prefix) for name in state_dict):
        reset_slots(module)  # torch may load new codes and biases, too
    taken: dict[str, list[Target]] = {}
    halves: dict[tuple[str, int | None], dict[str, Tensor]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, target, values in _given(module, places, state_dict, prefix, error_msgs):
            place = places[target.attribute]
            if isinstance(values, FP4Tensor) and place.holder is module:
                continue  # torch copies its codes
            taken.setdefault(target.attribute, []).append(target)
            del state_dict[name]
            try:
                check(module, place, target, name, values)
            except ValueError as error:
                error_msgs.append(str(error))
                continue
            if target.half and not target.bias:
                both = halves.setdefault((target.attribute, target.expert), {})
                both[target.half] = values
                if len(both) < len(HALVES):
                    continue
                del halves[target.attribute, target.expert]
                target, values = Target(target.attribute, target.expert), place.join(both)
            write(module, place, target, values)
        for (attribute, expert), one in halves.items():
            for half, values in one.items():
                write(module, places[attribute], Target(attribute, expert, half), values)
    for attribute, targets in taken.items():
        missing_keys += [prefix + name for name in _missing(places[attribute], attribute, targets)]
        holder = places[attribute].holder
        own: dict[str, Any] = {attribute: module._parameters.get(attribute)}
        if holder is not module:
            own = {f"{attribute}.{key}": t for key, t in holder.state_dict(keep_vars=True).items()}
        for key, tensor in own.items():  # weights that keep their values are not missing
            given = state_dict.setdefault(prefix + key, tensor)
            if key == f"{attribute}.packed" and given is not tensor:
                error_msgs.append(
                    f"fp4: {prefix}{attribute} is in the state dict twice, in 4 bits and as other values. "
                    "Give one of the two"
                )


def _has(module: nn.Module, name: str) -> bool:
    """Returns whether a module has a parameter, buffer or module with which this name begins."""
    first = name.partition(".")[0]
    return any(first in names for names in (module._parameters, module._buffers, module._modules))


def _could_be(places: dict[str, Place], values: Tensor) -> bool:
    """Returns whether values have the shape of all experts' matrices, of one matrix, of its gate or its up,
    or of one of these transposed."""
    if values.dim() not in (2, 3):
        return False
    *stack, n, k = values.shape
    for place in places.values():
        experts, rows, columns = place.shape
        if stack and stack not in ([experts], [place.codes.packed.shape[0]]):
            continue
        if any(sorted((n, k)) == sorted((r, columns)) for r in {rows, rows // (1 + place.gated)}):
            return True
    return False


def _given(
    module: nn.Module,
    places: dict[str, Place],
    state_dict: dict[str, Any],
    prefix: str,
    error_msgs: list[str],
) -> Iterator[tuple[str, Target, Tensor]]:
    """Yields name, target and values of each key that belongs to a 4-bit weight."""
    for name in [key for key in state_dict if key.startswith(prefix)]:
        rest, values = name[len(prefix) :], state_dict[name]
        target = target_of(places, rest)
        if target is not None and isinstance(values, Tensor):
            yield name, target, values
        elif target is not None:
            error_msgs.append(
                f"fp4: the new values for {name} are a {type(values).__name__}, not a tensor; the weight "
                "keeps its old values"
            )
        elif not isinstance(values, Tensor) or _has(module, rest) or not _could_be(places, values):
            continue  # torch takes it, or lists it as unexpected
        elif NUMBERED.match(rest):
            error_msgs.append(
                f"fp4: {name} has the shape of an expert's matrix, and no name that is known here "
                f"({', '.join(MATRICES)}); the experts are in 4 bits, and keep their old values"
            )
        else:
            error_msgs.append(
                f"fp4: {name} has the shape of a weight of these experts, and the name of none; they are in "
                f"4 bits, and keep their old values. Their weights are "
                f"{' and '.join(prefix + a for a in places)}"
            )


def _missing(place: Place, attribute: str, targets: list[Target]) -> list[str]:
    """Returns the names of the parts that are missing for a complete update."""
    given = {(t.expert, t.half) for t in targets if not t.bias}
    if (None, "") in given or not given:
        return []
    names = {half: f"{half}_proj" for half in HALVES} | {"": attribute}
    halves = HALVES if any(half for _, half in given) else ("",)
    every = ((e, half) for e in range(place.shape[0]) for half in halves)
    return [
        f"{e}.{names[half]}.weight" for e, half in every if (e, half) not in given and (e, "") not in given
    ]
