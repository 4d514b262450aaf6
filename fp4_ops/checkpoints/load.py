"""Stored weights into a model, one expert at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import Company, PackedWeight, Recipe
from ..meta.formats import FORMATS
from ..meta.layouts import preferred_layout
from ..prepare import A_FORMATS, check_activation, choose_implementation
from ..tensor import FP4Tensor
from .dialects import Codes, Dialect, Read, StoredWeight, scale_dtype
from .files import Reader, TensorInfo
from .fold import Folds, join_rows
from .placement import HALVES, Placement
from .progress import progress_bar


@dataclass
class LoadReport:
    """What a checkpoint held and what became of it."""

    dialect: str
    format: str
    experts: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    """Experts modules that stay in the plain layout, and why the device's own cannot hold them."""
    folds: Folds = field(default_factory=Folds)
    requantized: float = 0.0
    """Largest relative error of a matrix (norm of the difference over the norm) that was quantised anew."""
    nbytes: int = 0
    """Of the 4-bit weights: codes and scales."""

    def __str__(self) -> str:
        lines = [
            f"loaded {self.dialect} as {self.format}: {len(self.experts)} experts modules, "
            f"{len(self.linears)} linear layers, {self.nbytes / 2**20:.2f} MiB in 4 bits"
        ]
        lines += [f"  {name}: left alone: {why}" for name, why in self.left.items()]
        lines += [f"  {name}: layout plain: {why}" for name, why in self.plain.items()]
        if self.requantized:
            lines.append(f"  quantised anew: relative error of a matrix at most {self.requantized:.4f}")
        if self.folds.exact or self.folds.rounded:
            lines.append(f"  {self.folds}")
        return "\n".join(lines)


class Source:
    """Reads stored weights as codes of the operators' format."""

    def __init__(self, read: Read, report: LoadReport, requantize: str | None = None) -> None:
        self.read, self.report, self.requantize = read, report, requantize

    def format(self, stored: StoredWeight) -> str:
        """Of the operators' weight that becomes of it."""
        return self.requantize or stored.dialect.format

    def scale_dtype(self, weights: Iterable[StoredWeight], format: str) -> torch.dtype:
        """Of the block scales of a weight in `format` that is put together from these."""
        return scale_dtype(weights)

    def one(self, stored: StoredWeight) -> Codes:
        return stored.dialect.decode(stored, self.read)

    def pair(self, gate: StoredWeight, up: StoredWeight) -> Codes:
        """[gate; up] as one matrix."""
        return join_rows(self.one(gate), self.one(up), self.report.folds, (gate.name, up.name))


class Requantized(Source):
    """int4 that is quantised anew, gate and up as one."""

    def scale_dtype(self, weights: Iterable[StoredWeight], format: str) -> torch.dtype:
        return FORMATS[format].scale_dtype

    def one(self, stored: StoredWeight) -> Codes:
        return self._quantize([stored])

    def pair(self, gate: StoredWeight, up: StoredWeight) -> Codes:
        return self._quantize([gate, up])

    def _quantize(self, parts: list[StoredWeight]) -> Codes:
        values = torch.cat([part.dialect.values(part, self.read) for part in parts])
        format = self.format(parts[0])
        packed, block_scale, factor = torch.ops.fp4.quantize(values, format)
        again = torch.ops.fp4.dequantize(packed, block_scale, factor, format, torch.float32)
        error = ((again - values).norm() / values.norm()).nan_to_num(0.0).item()
        self.report.requantized = max(self.report.requantized, error)
        return Codes(packed, block_scale, factor if factor.numel() else None)


def load_weight(
    parts: dict[tuple[int | None, str], StoredWeight],
    shape: tuple[int, int, int],
    device: torch.device,
    source: Source,
) -> PackedWeight:
    """One weight [E, N, K] of an experts module, each expert read straight into its place."""
    format = source.format(next(iter(parts.values())))
    fmt, (e, n, k) = FORMATS[format], shape
    if (None, "") in parts:
        stack = source.one(parts[None, ""])
        weight = PackedWeight(stack.packed, stack.block_scale, stack.global_scale, format, "plain")
    else:
        packed = torch.empty((e, n, k // 2), dtype=torch.uint8, device=device)
        dtype = source.scale_dtype(parts.values(), format)
        block_scale = torch.empty((e, n, fmt.num_blocks(k)), dtype=dtype, device=device)
        global_scale = torch.empty((e,), dtype=torch.float32, device=device)
        for expert in range(e):
            if (expert, "") in parts:
                codes = source.one(parts[expert, ""])
            else:
                codes = source.pair(*(parts[expert, half] for half in HALVES))
            packed[expert] = codes.packed
            block_scale.view(torch.uint8)[expert] = codes.block_scale.to(dtype).view(torch.uint8)
            if codes.global_scale is not None:
                global_scale[expert] = codes.global_scale
        factor = global_scale if fmt.has_global_scale else None
        weight = PackedWeight(packed, block_scale, factor, format, "plain")
    return weight


def load_linear(codes: Codes, format: str, dtype: torch.dtype) -> nn.Parameter:
    weight = FP4Tensor(codes.packed, codes.block_scale, codes.global_scale, format=format, dtype=dtype)
    layout = preferred_layout(
        codes.packed.device.type, tuple(weight.shape), dtype=dtype, format=format, a_format="auto"
    )
    return nn.Parameter(weight.prepack(layout), requires_grad=False)


def detach_places(model: nn.Module, placement: Placement) -> None:
    """Takes the Parameters away that 4-bit weights will replace, so that nothing else fills them."""
    for name, placed in placement.experts.items():
        module = model.get_submodule(name)
        for attribute in placed.shapes:
            module._parameters[attribute] = None
        module._is_hf_initialized = True  # type: ignore[assignment]  # transformers: not at random
    for name in placement.linears:
        module = model.get_submodule(name)
        module._parameters["weight"] = None
        module._is_hf_initialized = True  # type: ignore[assignment]


def fill(
    model: nn.Module,
    placement: Placement,
    dialects: tuple[Dialect, ...],
    *,
    requantize: str | None,
    activation: str,
    trainable_inputs: bool,
    dtype: torch.dtype,
    device_of: Callable[[str], torch.device],
    progress: bool = True,
) -> LoadReport:
    """Puts the stored weights where `detach_places` made room. device_of: a module's name to its device."""
    formats = dict.fromkeys(requantize or w.dialect.format for w in _stored(placement))
    report = LoadReport(
        " and ".join(d.name for d in dialects), " and ".join(formats), left=dict(placement.left)
    )
    total = sum(info.nbytes for stored in _stored(placement) for info in stored.tensors)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        Reader() as reader,
        progress_bar(total, "4-bit weights", progress) as bar,
    ):

        def source(device: torch.device) -> Source:
            def read(info: TensorInfo) -> Tensor:
                bar.update(info.nbytes)
                return reader.read(info, device)

            return (Requantized if requantize else Source)(read, report, requantize)

        for name, placed in placement.experts.items():
            module: Any = model.get_submodule(name)
            device = device_of(name)
            weights = {}
            for attribute, shape in placed.shapes.items():
                parts = {key[1:]: w for key, w in placed.parts.items() if key[0] == attribute}
                weights[attribute] = load_weight(parts, shape, device, source(device))
            company = Company(list(weights.values()), dtype, A_FORMATS[activation] or "auto")
            if reason := company.settle():
                report.plain[name] = reason
            company.join()
            check_activation(activation, device.type, company.weights[0].layout)
            for attribute, weight in weights.items():
                del module._parameters[attribute]
                module.add_module(attribute, weight)
                report.nbytes += weight.num_bytes
            form = placed.plan.form.of(module)
            module._fp4_recipe = Recipe(form, placed.plan.gate, A_FORMATS[activation], trainable_inputs)
            if trainable_inputs:
                module.requires_grad_(False)  # biases, too
            report.experts.append(name)
        for name, stored in placement.linears.items():
            linear: Any = model.get_submodule(name)
            codes = source(device_of(name))
            linear.weight = load_linear(codes.one(stored), codes.format(stored), dtype)
            report.linears.append(name)
            report.nbytes += linear.weight.nbytes
    choose_implementation(model)
    if report.folds.rounded:
        warnings.warn(f"fp4: {report}", stacklevel=2)
    return report


def _stored(placement: Placement) -> Iterable[StoredWeight]:
    for placed in placement.experts.values():
        yield from placed.parts.values()
    yield from placement.linears.values()
