"""Checks, from headers alone, that a folder that will be written can be loaded again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..experts.names import wrapper_in
from ..meta.text import first_line
from .dialects import Dialect, StoredWeight, stored_weights
from .files import INCOMPLETE, OTHER_MODEL, PREFIXED, CheckpointError, TensorInfo
from .folder import Folder

Header = tuple[str, torch.dtype, tuple[int, ...]]


def check_loadable(
    folder: Folder, outputs: Iterable[Header], dialects: Iterable[Dialect], *, runs: bool = False
) -> None:
    """Raises CheckpointError unless `load_checkpoint` finds a place for every 4-bit weight of `outputs`.

    folder: the source. The result gets its config. If transformers cannot build a model from it, nothing is
        checked, and a warning says so.
    runs: whether the model of the config will run, so that it needs all of its weights.
    """
    try:
        model = _on_meta(folder)
    except Exception as error:  # possible causes: remote code, an unknown family, an incomplete config
        _warn(
            f"fp4: {folder.path}: whether the result can be loaded is not known: transformers builds no "
            f"model from its config ({type(error).__name__}: {first_line(str(error))})"
        )
        return
    from .placement import is_left_out, place, rules  # which import transformers

    tensors = {n: TensorInfo(n, dtype, shape, Path("the result"), 0) for n, dtype, shape in outputs}
    try:
        weights = stored_weights(tensors, dialects)
        target, modules = rules(model), dict(model.named_modules())
        where = {name: target(w.dialect.module_name(name)).parameter for name, w in weights.items()}
        outside = [name for name in weights if _in_no_layer(where[name], modules)]
        unknown = [name for name in outside if not is_left_out(model, name)]
        if unknown:
            _warn(
                f"fp4: {len(unknown)} matrices are in layers that the model of {folder.path} does not have "
                f"({unknown[0]} and the like); load_checkpoint refuses the result then, unless "
                "its config has those layers"
            )
        inside = {name: w for name, w in weights.items() if name not in set(outside)}
        placement = place(model, inside, tensors.values())
        _check_others(folder, tensors, weights, {*where.values(), *placement.dense}, runs)
    except CheckpointError as error:
        is_of_the_files = any(advice in str(error) for advice in (OTHER_MODEL, INCOMPLETE, PREFIXED))
        if is_of_the_files:
            raise CheckpointError(f"{error}. Nothing was written") from None
        family = folder.config.get("model_type")
        raise CheckpointError(
            f"{error}\nfp4: {folder.path} is a {family}, whose experts load_checkpoint could not load once "
            "they are in 4 bits; nothing was written. Load the original and call fp4_ops.prepare, or compile "
            "it with torch.compile(model, backend='fp4')"
        ) from None


def _check_others(
    folder: Folder,
    tensors: dict[str, TensorInfo],
    weights: dict[str, StoredWeight],
    filled: set[str],
    runs: bool,
) -> None:
    """Raises CheckpointError for weights of the model that no tensor of the result fills, or that a tensor of
    another shape fills.

    filled: the parameters that our loader fills.

    transformers compares them with its model, on the meta device, because only transformers knows which
    weights may be missing. If this fails, nothing is checked, and a warning says so. If the config names no
    class of transformers, the model may be of another class than the compared one, so there is only a
    warning unless the model `runs`.
    """
    from transformers import AutoConfig

    from .families import model_class, named_class

    codes = {info.name for w in weights.values() for info in w.tensors}
    state = {
        n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items() if n not in codes
    }
    config = AutoConfig.from_pretrained(folder.path)
    named, cls = named_class(config), model_class(config)
    try:
        info = _loading_info(cls, config, state)
    except Exception as error:  # possible causes: no accelerate, a conversion that reads values
        _warn(
            f"fp4: {folder.path}: whether weights outside the experts are missing is not known: transformers "
            f"cannot compare them with its model ({type(error).__name__}: {first_line(str(error))})"
        )
        return
    missing, mismatched = sorted(info["missing_keys"] - filled), sorted(info["mismatched_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" * (len(missing) > 3)
        wrong = f"fp4: {folder.path} has no values for {', '.join(missing[:3])}{more}, which the model"
        wrong, advice = f"{wrong} of its config needs", INCOMPLETE
        if (wrapped := next(filter(wrapper_in, tensors), None)) is not None:
            advice = f"It has {wrapped}, with {wrapper_in(wrapped)!r} in its name. {PREFIXED}"
    elif mismatched:
        name, stored, wanted = mismatched[0]
        wrong = f"fp4: {name} of {folder.path} has shape {list(stored)}; the model's is {list(wanted)}"
        advice = OTHER_MODEL
    else:
        return
    if named is not None:
        raise CheckpointError(f"{wrong}. {advice}")
    if runs:
        raise CheckpointError(
            f"{wrong}, if it is a {cls.__name__}. The config names no class that transformers has, and "
            f"calibration runs the model. {advice}; or use method 'search', which needs no calibration"
        )
    _warn(
        f"{wrong}, if it is a {cls.__name__}. The config names no class that transformers has. If the model "
        "is of another class, give load_checkpoint a model of that class (model_or_config)"
    )


def _warn(message: str) -> None:
    """Warns the caller of the command."""
    warnings.warn(message, stacklevel=4)


def _loading_info(cls: Any, config: Any, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Has transformers load a state dict of the meta device, and returns what it says about missing keys."""
    from transformers.utils import logging

    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):  # the result is described by tensors here
            del part.quantization_config
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        _, info = cls.from_pretrained(
            None, config=config, state_dict=state, device_map="meta", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    return dict(info)


def _in_no_layer(parameter: str, modules: dict[str, nn.Module]) -> bool:
    """Returns whether a parameter belongs to a layer number that the model's list of layers does not have."""
    parts = parameter.split(".")
    known = next(i for i in range(len(parts), -1, -1) if ".".join(parts[:i]) in modules)
    return known < len(parts) and parts[known].isdigit()


def _on_meta(folder: Folder) -> nn.Module:
    from transformers import AutoConfig

    from .families import model_class, register_families

    register_families()
    config = AutoConfig.from_pretrained(folder.path)
    cls: Any = model_class(config)
    make = getattr(cls, "from_config", None) or cls._from_config
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(config)
