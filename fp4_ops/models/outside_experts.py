"""Finds and packs linear layers outside the experts, by kind, for `prepare`.

A decoding step also reads the weights of attention and of the output head. In bf16 these are most of the
bytes that it reads. A kind may be in a 4-bit format, or in fp8 with a scale for each row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..experts.find import is_experts
from ..meta.dtensors import split_over_processes
from ..meta.formats import FORMATS
from ..tensor import FP4Tensor
from .expert_lists import find_lists, put
from .fp8_linear import FP8, FP8Linear, put_fp8
from .prepare_report import OutsideWeights

Kind = Literal["attention", "dense", "head"]
KINDS: tuple[Kind, ...] = ("attention", "dense", "head")
KEEP = "keep"

_ATTENTION = re.compile(r"attn|attention")
_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_NEITHER = re.compile(r"(^|\.)(embed\w*|router|gate|score\w*|shared_expert_gate)\.weight$")
"""Weights that keep their dtype. Embeddings are looked up, not multiplied. A router in 4 bits would choose
other experts."""


def kind_of(name: str) -> Kind | None:
    """Return the kind of a weight by its name in the model. None for weights that always keep their dtype."""
    if _NEITHER.search(name):
        return None
    if _HEAD.search(name):
        return "head"
    return "attention" if _ATTENTION.search(name) else "dense"


def chosen_formats(wanted: Mapping[Kind, str], instead_of_fp8: str = "") -> dict[Kind, str]:
    """Return the formats of kinds that do not keep their dtype. Raises ValueError for unknown formats.

    instead_of_fp8: for callers that do not take "fp8": what to do instead, with {kind} for the option's name.
    """
    names = (KEEP, *FORMATS, *(() if instead_of_fp8 else (FP8,)))
    for kind, format in wanted.items():
        if format not in names:
            more = f". {instead_of_fp8.format(kind=kind)}" if instead_of_fp8 and format == FP8 else ""
            raise ValueError(f"fp4: {kind} is {format!r}; it must be one of: {', '.join(names)}{more}")
    return {kind: format for kind, format in wanted.items() if format != KEEP}


@dataclass(frozen=True)
class Outside:
    """The linear layers of a model that are to be in 4 bits or in fp8, by kind."""

    model: nn.Module
    formats: Mapping[Kind, str]
    places: Mapping[Kind, Mapping[str, nn.Linear]]
    """Layers of each kind, by the name of the weight."""
    batch_invariant: bool = False

    def pack(self) -> list[OutsideWeights]:
        """Replace the weights, one at a time, by FP4Tensors or codes in fp8; the originals are freed."""
        return [self._pack_kind(kind, format) for kind, format in self.formats.items()]

    def _pack_kind(self, kind: Kind, format: str) -> OutsideWeights:
        before, after = 0, 0
        packed: dict[int, nn.Linear] = {}  # a weight may serve several layers
        for name, linear in self.places[kind].items():
            weight, first = linear.weight, packed.get(id(linear.weight))
            with torch.inference_mode(False), torch.no_grad():
                if format == FP8:
                    assert first is None or isinstance(first, FP8Linear)
                    made = put_fp8(linear, first)
                    nbytes = made.weight.nbytes + made.weight_scale.nbytes
                elif first is None:
                    codes = torch.ops.fp4.quantize(weight.detach()[None], format)
                    nbytes = put(linear, codes, format, batch_invariant=self.batch_invariant)
                else:
                    linear.weight = first.weight
            if first is None:
                before, after = before + weight.nbytes, after + nbytes
                packed[id(weight)] = linear
                untie(self.model, name)
        return OutsideWeights(kind, format, len(self.places[kind]), before, after)


def check_gradients(formats: Mapping[Kind, str], trainable_inputs: bool) -> None:
    """Raises ValueError if gradients must pass through a model with these kinds in 4 bits or in fp8."""
    if trainable_inputs and formats:
        kind, given = next(iter(formats.items()))
        raise ValueError(
            f"fp4: trainable_inputs=True, and {kind} is {given!r}: 4-bit and fp8 layers outside the experts "
            f"pass no gradients on. Leave {kind} out"
        )


def check_batch_invariant(formats: Mapping[Kind, str], batch_invariant: bool) -> None:
    """Raises ValueError for kinds in fp8 whose results must not depend on the rest of the batch."""
    for kind, format in formats.items():
        if batch_invariant and format == FP8:
            raise ValueError(
                f"fp4: batch_invariant=True, and {kind} is {FP8!r}: fp4::fp8_linear sums in an order that "
                f"depends on the number of rows. Leave {kind} out, or use a 4-bit format"
            )


def find_outside(
    model: nn.Module,
    wanted: Mapping[Kind, str],
    trainable_inputs: bool = False,
    batch_invariant: bool = False,
) -> Outside:
    """Find the layers of the kinds that `wanted` gives a format, and check their weights.

    Raises ValueError for a format that does not exist, for a kind without layers in the model, for weights
    that cannot be packed, if gradients would have to pass through these layers, and for layers in fp8 whose
    results must not depend on the rest of the batch. The model is unchanged.
    """
    formats = chosen_formats(wanted)
    check_gradients(formats, trainable_inputs)
    check_batch_invariant(formats, batch_invariant)
    places: dict[Kind, dict[str, nn.Linear]] = {kind: {} for kind in formats}
    for name, linear in _linears(model, _experts(model)):
        own: Kind | None = "head" if linear is _head(model) else kind_of(name)
        if own is not None and own in formats:
            _check(own, name, linear.weight, formats[own])
            places[own][name] = linear
    for kind, found in places.items():
        if not found:
            raise ValueError(
                f"fp4: {kind} is {formats[kind]!r}, and the model has no such linear layer. Leave it out"
            )
    return Outside(model, formats, places, batch_invariant)


def untie(model: Any, name: str) -> None:
    """Tell transformers that a parameter no longer shares another one's memory, whatever the config says."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    if tied.pop(name, None) is not None and not tied:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _experts(model: nn.Module) -> Collection[str]:
    """Return the names of modules whose weights belong to experts."""
    lists, refused = find_lists(model)
    return {*lists, *refused, *(name for name, m in model.named_modules() if is_experts(m))}


def _linears(model: nn.Module, experts: Collection[str]) -> list[tuple[str, nn.Linear]]:
    below = tuple(f"{name}." for name in experts)
    return [
        (f"{name}.weight" if name else "weight", m)
        for name, m in model.named_modules()
        if type(m) is nn.Linear and not f"{name}.".startswith(below) and not isinstance(m.weight, FP4Tensor)
    ]


def _head(model: Any) -> nn.Module | None:
    found = getattr(model, "get_output_embeddings", None)
    return found() if found is not None else None


def _check(kind: Kind, name: str, weight: Tensor, format: str) -> None:
    why = ""
    if weight.is_meta:
        why = "is on the meta device; load the weights before prepare"
    elif parts := split_over_processes(weight):
        why = f"is {parts}; leave {kind} out"
    elif weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        why = f"is {weight.dtype}; it must be float32, bfloat16 or float16"
    elif weight.shape[-1] % 2 and format != FP8:
        why = f"has an odd number of inputs, {weight.shape[-1]}; leave {kind} out, or use {FP8!r}"
    elif not weight.isfinite().all():
        which = FP8 if format == FP8 else "4-bit"
        why = f"holds NaN or infinity, which have no {which} code. Correct it before prepare"
    if why:
        raise ValueError(f"fp4: {name} {why}")
