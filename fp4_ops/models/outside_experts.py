"""Finds and packs linear layers outside the experts, by kind, for `prepare`.

A decoding step also reads the weights of attention and of the output head. In bf16 these are most of the
bytes that it reads.
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


def chosen_formats(wanted: Mapping[Kind, str]) -> dict[Kind, str]:
    """Return the formats of kinds that do not keep their dtype. Raises ValueError for unknown formats."""
    for kind, format in wanted.items():
        if format not in (KEEP, *FORMATS):
            raise ValueError(f"fp4: {kind} is {format!r}; it must be one of: {', '.join((KEEP, *FORMATS))}")
    return {kind: format for kind, format in wanted.items() if format != KEEP}


@dataclass(frozen=True)
class Outside:
    """The linear layers of a model that are to be in 4 bits, by kind."""

    model: nn.Module
    formats: Mapping[Kind, str]
    places: Mapping[Kind, Mapping[str, nn.Linear]]
    """Layers of each kind, by the name of the weight."""
    batch_invariant: bool = False

    def pack(self) -> list[OutsideWeights]:
        """Replace the weights, one at a time, by FP4Tensors; the originals are freed."""
        return [self._pack_kind(kind, format) for kind, format in self.formats.items()]

    def _pack_kind(self, kind: Kind, format: str) -> OutsideWeights:
        before, after = 0, 0
        packed: dict[int, Any] = {}  # a weight may serve several layers
        for name, linear in self.places[kind].items():
            weight = linear.weight
            if id(weight) in packed:
                linear.weight = packed[id(weight)]
                continue
            before += weight.nbytes
            with torch.inference_mode(False), torch.no_grad():
                codes = torch.ops.fp4.quantize(weight.detach()[None], format)
                after += put(linear, codes, format, batch_invariant=self.batch_invariant)
            packed[id(weight)] = linear.weight
            untie(self.model, name)
        return OutsideWeights(kind, format, len(self.places[kind]), before, after)


def check_gradients(formats: Mapping[Kind, str], trainable_inputs: bool) -> None:
    """Raises ValueError if gradients must pass through a model with these kinds in 4 bits."""
    if trainable_inputs and formats:
        kind, given = next(iter(formats.items()))
        raise ValueError(
            f"fp4: trainable_inputs=True, and {kind} is {given!r}: 4-bit layers outside the experts pass no "
            f"gradients on. Leave {kind} out"
        )


def find_outside(
    model: nn.Module,
    wanted: Mapping[Kind, str],
    trainable_inputs: bool = False,
    batch_invariant: bool = False,
) -> Outside:
    """Find the layers of the kinds that `wanted` gives a format, and check their weights.

    Raises ValueError for a format that does not exist, for a kind without layers in the model, for weights
    that cannot be packed, and if gradients would have to pass through these layers. The model is unchanged.
    """
    formats = chosen_formats(wanted)
    check_gradients(formats, trainable_inputs)
    places: dict[Kind, dict[str, nn.Linear]] = {kind: {} for kind in formats}
    for name, linear in _linears(model, _experts(model)):
        own: Kind | None = "head" if linear is _head(model) else kind_of(name)
        if own is not None and own in formats:
            _check(own, name, linear.weight)
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


def _check(kind: Kind, name: str, weight: Tensor) -> None:
    why = ""
    if weight.is_meta:
        why = "is on the meta device; load the weights before prepare"
    elif parts := split_over_processes(weight):
        why = f"is {parts}; leave {kind} out"
    elif weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        why = f"is {weight.dtype}; it must be float32, bfloat16 or float16"
    elif weight.shape[-1] % 2:
        why = f"has an odd number of inputs, {weight.shape[-1]}; leave {kind} out"
    elif not weight.isfinite().all():
        why = "holds NaN or infinity, which have no 4-bit code. Correct it before prepare"
    if why:
        raise ValueError(f"fp4: {name} {why}")
