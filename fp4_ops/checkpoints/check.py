"""Checks, from headers alone, that a folder that will be written can be loaded again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..experts.find import form_of, is_experts
from ..meta.text import first_line
from .dialects import Dialect, StoredWeight, stored_weights
from .files import INCOMPLETE, OTHER_MODEL, PREFIXED, CheckpointError, TensorInfo
from .folder import Folder

Header = tuple[str, torch.dtype, tuple[int, ...]]


def check_loadable(folder: Folder, outputs: Iterable[Header], dialects: Iterable[Dialect]) -> None:
    """Raises CheckpointError unless `load_checkpoint` finds a place for every 4-bit weight of `outputs`.

    folder: the source. The result gets its config. If transformers cannot build a model from it, nothing is
    checked, and a warning says so.
    """
    try:
        model = _on_meta(folder)
    except Exception as error:  # possible causes: remote code, an unknown family, an incomplete config
        warnings.warn(
            f"fp4: {folder.path}: whether the result can be loaded is not known: transformers builds no "
            f"model from its config ({type(error).__name__}: {first_line(str(error))})",
            stacklevel=3,
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
            warnings.warn(
                f"fp4: {len(unknown)} matrices are in layers that the model of {folder.path} does not have "
                f"({unknown[0]} and the like); load_checkpoint will refuse the result for their sake, unless "
                "its config has those layers",
                stacklevel=3,
            )
        inside = {name: w for name, w in weights.items() if name not in set(outside)}
        place(model, inside, tensors.values())
        _check_others(folder, model, tensors, weights, set(where.values()))
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
    model: nn.Module,
    tensors: dict[str, TensorInfo],
    weights: dict[str, StoredWeight],
    filled: set[str],
) -> None:
    """Raises CheckpointError for weights of the model that no tensor of the result fills.

    transformers is asked, with tensors on the meta device, because only it knows which may be missing. If it
    cannot say, nothing is checked.
    """
    codes = {info.name for w in weights.values() for info in w.tensors}
    state = {
        n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items() if n not in codes
    }
    try:
        info = _loading_info(folder, state)
    except Exception:  # possible causes: remote code, a conversion that reads values
        return
    experts = {name for name, m in model.named_modules() if is_experts(m) or form_of(m)}
    filled |= {n for n in info["missing_keys"] if n.endswith("bias") and n.rpartition(".")[0] in experts}
    missing = sorted(info["missing_keys"] - filled)
    if missing:
        more = f" and {len(missing) - 3} more" * (len(missing) > 3)
        raise CheckpointError(
            f"fp4: {folder.path} has no values for {', '.join(missing[:3])}{more}, which the model of its "
            f"config needs. {INCOMPLETE}"
        )
    for name, stored, wanted in info["mismatched_keys"]:
        raise CheckpointError(
            f"fp4: {name} of {folder.path} has shape {list(stored)}; the model's is {list(wanted)}. "
            f"{OTHER_MODEL}"
        )


def _loading_info(folder: Folder, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Has transformers load a state dict of the meta device, and returns what it says about missing keys."""
    from transformers import AutoConfig
    from transformers.utils import logging

    from .families import model_class

    config = AutoConfig.from_pretrained(folder.path)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):  # the result is described by tensors here
            del part.quantization_config
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        _, info = model_class(config).from_pretrained(
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
