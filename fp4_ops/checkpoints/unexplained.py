"""Finds quantised weights in folders whose config.json does not say that anything is quantised.

Such a folder may have tensors of quantisation and still be in 16 bits: scales that a script left when it
dequantised the weights, or a layer that the model does not have. What counts is the model's own weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .dialects import DIALECTS
from .files import CheckpointError, TensorInfo, unexplained
from .foreign import FOREIGN, Foreign
from .placement import rules

_PACKED = tuple({d.packed for d in DIALECTS.values()} - {"", ".weight"})
_SCALES = tuple({d.block_scale for d in DIALECTS.values()})
_FOREIGN = [(kind, re.compile(f"(?:{kind.tensor})$")) for kind in FOREIGN if kind.tensor]


def refuse_codes(model: Any, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError if the files hold codes in place of a weight that the model asks for.

    model: as transformers builds it, on any device, even meta.
    tensors: all tensors of the files, by name.
    """
    found = [(name, kind, weights) for name in tensors for kind, weights in _weights_of(name, tensors)]
    if not found:
        return
    target, state = rules(model), model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", None) or ()
    for name, kind, weights in found:
        if target.parameter(name) in state:
            continue  # the model has a place for it
        for weight in weights:
            place = target.parameter(weight)
            own = state.get(place)
            if own is None or not own.is_floating_point() or place in tied:
                continue
            if place in tensors and tensors[place].is_ordinary:
                continue
            info = tensors.get(weight, tensors[name])
            if kind is not None:
                raise CheckpointError(kind.refusal(info.file.parent, name))
            raise unexplained(info)


def _weights_of(name: str, tensors: Mapping[str, TensorInfo]) -> list[tuple[Foreign | None, tuple[str, ...]]]:
    """Returns the weights that a tensor's name belongs to, if it is one of quantisation and the files do not
    hold them as ordinary ones, and the tool that uses such names."""
    found: list[tuple[Foreign | None, tuple[str, ...]]] = []
    for end in _PACKED:
        if name.endswith(end) and not tensors[name].is_ordinary:
            found.append((None, _candidates(name.removesuffix(end))))
    for end in _SCALES:
        if name.endswith(end):
            # Scales alone say nothing: the weight must be there, as codes.
            found.append((None, tuple(w for w in _candidates(name.removesuffix(end)) if w in tensors)))
    for kind, pattern in _FOREIGN:
        if (match := pattern.search(name)) is not None:
            found.append((kind, _candidates(name[: match.start()])))
    return [
        (kind, weights)
        for kind, weights in found
        if weights and not any(w in tensors and tensors[w].is_ordinary for w in weights)
    ]


def _candidates(base: str) -> tuple[str, ...]:
    """Returns the names that a weight may have: a layer's, and a stack's."""
    return f"{base}.weight", base
