"""Turns a prepared model into the tensors of a 4-bit folder that other tools can read."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils

from ...checkpoints.dialects import (
    EXPERTS_TARGET,
    FLOAT8,
    Codes,
    Dialect,
    describe,
    encode,
    encode_rows,
    writing_dialect,
)
from ...checkpoints.placement import Target, rules
from ...checkpoints.shared import shared_by_class
from ...experts.names import HALVES
from ...experts.packed import PackedWeight
from ...models.fp8_linear import FP8Linear
from ...tensor import FP4Tensor


def state_dict_for_saving(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns (tensors by name, quantization_config). The names are transformers' own; `save_pretrained`
    turns them into those of the family's checkpoints."""
    for name, module in model.named_modules():
        part = getattr(getattr(module, "_fp4_recipe", None), "part", None)
        if part is not None:
            raise ValueError(
                f"fp4: {name} has {part} here; a folder needs all. Save a model that is whole in one process"
            )
    once = shared_by_class(model)
    packed = {
        n: m
        for n, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, PackedWeight) and n.rpartition(".")[0] not in once
    }
    linears = {
        n: m.weight
        for n, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, nn.Linear) and isinstance(m.weight, FP4Tensor)
    }
    in_fp8 = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, FP8Linear)}
    stacks = {
        f"{n}.{attribute}": w
        for n, m in model.named_modules(remove_duplicate=False)
        for attribute, w in m._parameters.items()
        if isinstance(w, FP4Tensor) and w.dim() == 3
    }
    if not (packed or stacks or linears):
        raise ValueError("fp4: the model holds no 4-bit weights; call fp4_ops.prepare first")
    experts: dict[str, PackedWeight | FP4Tensor] = {**packed, **stacks}
    dialects = _dialects(model, experts, linears, alone=not (linears or in_fp8))

    ours = tuple(f"{n}." for n in (*packed, *once)) + tuple(stacks)
    ours += tuple(f"{n}.weight" for n in (*linears, *in_fp8))
    state = {name: t for name, t in model.state_dict().items() if not name.startswith(ours)}
    names = stored_names(model)
    for name, weight in packed.items():
        state.update(_experts(name, weight.in_layout("plain"), dialects[weight.format], names))
    for name, stack in stacks.items():
        state.update(_experts(name, stack.prepack("plain")._operands(), dialects[stack.format], names))
    for name, matrix in linears.items():
        state.update(encode(name, _codes(*matrix.prepack("plain")._operands()), dialects[matrix.format]))
    for name, layer in in_fp8.items():
        # safetensors wants tensors that own their memory, and layers may share theirs
        codes, scale = layer.weight.detach().cpu().clone(), layer.weight_scale.cpu().clone()
        state.update(encode_rows(name, codes, scale))

    quantised = {*linears, *in_fp8}
    dense = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in quantised]
    targets: dict[str, list[str]] = {format: [] for format in dialects}
    of_one = len({weight.format for weight in experts.values()}) == 1
    for name, of in experts.items():
        own = EXPERTS_TARGET if of_one else rf"re:.*{re.escape(name.rpartition('.')[0])}\.\d+\..*"
        if own not in targets[of.format]:
            targets[of.format].append(own)
    for name, matrix in linears.items():
        targets[matrix.format].append(name)
    groups = [(dialects[format], names) for format, names in targets.items()]
    return state, describe(groups + [(FLOAT8, list(in_fp8))] * bool(in_fp8), dense)


def _dialects(
    model: Any,
    experts: Mapping[str, PackedWeight | FP4Tensor],
    linears: Mapping[str, FP4Tensor],
    alone: bool,
) -> dict[str, Dialect]:
    """Returns the dialect in which each format of a model is written. The experts' formats come first."""
    k: dict[str, set[int]] = {}
    for weight in experts.values():
        k.setdefault(weight.format, set()).add(weight.k)
    for matrix in linears.values():
        k.setdefault(matrix.format, set()).add(matrix.shape[-1])
    alone = alone and len(k) == 1  # GPT-OSS's own dialect holds only experts
    family = getattr(model.config, "model_type", None)
    return {format: writing_dialect(format, family, sizes, alone) for format, sizes in k.items()}


def _codes(packed: Tensor, block_scale: Tensor, global_scale: Tensor | None) -> Codes:
    return Codes(packed.detach().cpu(), block_scale.detach().cpu(), global_scale)


def _experts(
    name: str,
    plain: tuple[Tensor, Tensor, Tensor | None],
    dialect: Dialect,
    names: Callable[[str, int], list[str]],
) -> dict[str, Tensor]:
    if dialect.stacked:
        return encode(name, _codes(*plain), dialect)
    state: dict[str, Tensor] = {}
    for expert in range(plain[0].shape[0]):
        parts = names(name, expert)
        codes = _codes(*(None if t is None else t[expert] for t in plain))  # type: ignore[arg-type]
        rows = codes.packed.shape[0] // len(parts)
        for i, part in enumerate(parts):
            half = slice(i * rows, (i + 1) * rows)
            one = Codes(codes.packed[half], codes.block_scale[half], codes.global_scale)
            # safetensors wants tensors that own their memory
            state.update({k: t.clone() for k, t in encode(part, one, dialect).items()})
    return state


def stored_names(model: nn.Module) -> Callable[[str, int], list[str]]:
    """Returns a function from an experts weight and an expert's number to the names of its stored matrices:
    one, or gate and up.

    transformers' rules are applied in reverse to get the names, and then forwards to check them. If the
    family's checkpoints stack a weight, its name gets the expert's number.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    target = rules(model)

    def plain(pattern: str) -> str:
        return re.sub(r"[\\^$]", "", pattern)

    def names(parameter: str, expert: int) -> list[str]:
        for converter in converters:
            end = plain(converter.target_patterns[0])
            if len(converter.target_patterns) != 1 or not parameter.endswith(end):
                continue
            start = parameter.removesuffix(end)
            sources = [start + plain(s).replace("*", str(expert)) for s in converter.source_patterns]
            halves = HALVES if len(sources) == 2 else ("",)
            if [target(s) for s in sources] == [Target(parameter, expert, half) for half in halves]:
                return [s.removesuffix(".weight") for s in sources]
        owner, _, attribute = parameter.rpartition(".")
        return [f"{owner}.{expert}.{attribute}"]

    return names


def name_failed_files(quantizer: type) -> None:
    """Makes `save_pretrained` of models with this quantizer name the file that could not be written.

    transformers and safetensors raise the disk's error alone. A second call changes nothing.
    """
    original: Any = PreTrainedModel.save_pretrained
    if hasattr(original, "_fp4_original"):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(self, "hf_quantizer", None), quantizer):
            return original(self, save_directory, *args, **kwargs)
        write: Any = modeling_utils.safe_save_file
        at = str(save_directory)

        def noted(tensors: Any, file: Any, *more: Any, **how: Any) -> Any:
            nonlocal at
            at = str(file)
            return write(tensors, file, *more, **how)

        modeling_utils.safe_save_file = noted  # type: ignore[assignment]
        try:
            return original(self, save_directory, *args, **kwargs)
        except (OSError, SafetensorError) as error:
            found = re.search(r"os error (\d+)", str(error))  # safetensors gives the number as text only
            number = getattr(error, "errno", None) or (int(found[1]) if found else None)
            if number is None:
                raise
            file = getattr(error, "filename", None) or at
            raise OSError(
                number,
                f"fp4: {file} could not be written: {os.strerror(number)}. The folder is not whole: once "
                "this is fixed, call save_pretrained again",
            ) from error
        finally:
            modeling_utils.safe_save_file = write

    save_pretrained._fp4_original = original  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]
