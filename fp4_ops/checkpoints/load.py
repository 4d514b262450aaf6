"""Loads stored weights into a model, one expert at a time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..backends import check_activation
from ..distributed.parts import keep_for_itself, keep_local
from ..experts.names import HALVES, wrapper_in
from ..experts.packed import IMPLEMENTATION, PackedWeight, Recipe, SharedLayout, interleave
from ..meta.formats import FORMATS, check_activation_choice
from ..meta.layouts import preferred_layout
from ..models.fp8_linear import has_kernel, put_codes
from ..models.memory_plan import MemoryPlan
from ..models.new_weights import take_new_weights
from ..models.outside_experts import kind_of, untie
from ..models.pack_experts import A_FORMATS, choose_implementation
from ..tensor import FP4Tensor
from .dialects import FLOAT8, Codes, Read, StoredWeight, scale_dtype
from .files import DAMAGED, PREFIXED, CheckpointError, Reader, TensorInfo
from .fold import Folds, join_rows
from .placement import DensePlacement, ExpertsPlacement, Part, Placement
from .progress import progress_bar
from .ranks import columns


@dataclass
class LoadReport:
    """The contents of a checkpoint, and how each part was loaded."""

    dialect: str
    format: str
    experts: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    """Experts modules that stay in the plain layout, and why the device's own layout cannot hold them."""
    dense: list[str] = field(default_factory=list)
    """Parameters that were stored in 8 bits and are ordinary parameters now."""
    fp8: list[str] = field(default_factory=list)
    """Weights of linear layers that were stored in fp8 with a scale for each row, and stay so."""
    own_code: dict[str, str] = field(default_factory=dict)
    """Experts modules that run their own code, product by product, and why `fp4::moe` cannot run them."""
    folds: Folds = field(default_factory=Folds)
    requantized: float = 0.0
    """Largest relative error (norm of the difference over the norm) of a matrix that was quantised again."""
    nbytes: int = 0
    """Bytes of the 4-bit weights: codes and scales."""
    memory: MemoryPlan | None = None
    """A plan that says where the weights are stored, if `gpu_memory` was given."""

    def __str__(self) -> str:
        lines = [
            f"loaded {self.dialect} as {self.format}: {len(self.experts)} experts modules, "
            f"{len(self.linears)} linear layers, {self.nbytes / 2**20:.2f} MiB in 4 bits"
        ]
        if self.dense:
            lines.append(f"  {_names(self.dense)}: 8 bits, dequantised")
        if self.fp8:
            lines.append(f"  {_names(self.fp8)}: fp8, as stored")
        for what, modules in (
            ("left alone", self.left),
            ("layout plain", self.plain),
            ("runs by its own code", self.own_code),
        ):
            for why in dict.fromkeys(modules.values()):
                names = [name for name, reason in modules.items() if reason == why]
                lines.append(f"  {_names(names)}: {what}: {why}")
        if self.requantized:
            lines.append(f"  quantised anew: relative error of a matrix at most {self.requantized:.4f}")
        if self.folds.exact or self.folds.rounded:
            lines.append(f"  {self.folds}")
        if self.memory is not None:
            lines += [f"  {line}" for line in str(self.memory).splitlines()]
        return "\n".join(lines)


def _names(names: list[str]) -> str:
    """Returns a text with the names, if they are few, or with patterns that have * for numbers."""
    if len(names) <= 2:
        return " and ".join(names)
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
    more = f" and {len(patterns) - 3} more" * (len(patterns) > 3)
    return f"{', '.join(patterns[:3])}{more} ({len(names)} in all)"


def check_info(info: dict[str, Any], path: object) -> None:
    """Raises CheckpointError for weights that transformers would fill at random.

    info: the second result of `from_pretrained(..., output_loading_info=True)`.
    """
    for key in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(key):
            found = sorted(map(str, info[key]))
            more = f" and {len(found) - 3} more" * (len(found) > 3)
            what = f"{key.replace('_', ' ')}: {', '.join(found[:3])}{more}"
            wrapped = next(
                (name for name in sorted(info.get("unexpected_keys", ())) if wrapper_in(name)), None
            )
            if key == "missing_keys" and wrapped is not None:
                what += f". The files have {wrapped}, with {wrapper_in(wrapped)!r} in its name. {PREFIXED}"
            if key == "missing_keys" and any("lora_" in name for name in info[key]):
                what += (
                    ". They are of the adapter that adapter_config.json describes, which transformers loads "
                    "with the model. If you do not want it, move adapter_config.json out of the folder"
                )
            raise CheckpointError(f"fp4: {path}: {what}")


class Source:
    """Reads stored weights as codes of the operators' format."""

    def __init__(self, read: Read, report: LoadReport, requantize: str | None = None) -> None:
        self.read, self.report, self.requantize = read, report, requantize

    def format(self, stored: StoredWeight) -> str:
        """Returns the format of the weight that the operators get for `stored`."""
        return self.requantize or stored.dialect.format

    def scale_dtype(self, weights: Iterable[StoredWeight], format: str) -> torch.dtype:
        """Returns the dtype of block scales of a weight in `format` that is put together from `weights`."""
        return scale_dtype(weights)

    def one(self, stored: StoredWeight) -> Codes:
        return stored.dialect.decode(stored, self.read)

    def dense(self, part: StoredWeight | TensorInfo, dtype: torch.dtype) -> Tensor:
        """Returns the weight as an ordinary tensor."""
        if isinstance(part, StoredWeight):
            return part.dialect.dequantize(part, self.read, dtype)
        return self.read(part).to(dtype)

    def pair(self, gate: StoredWeight, up: StoredWeight) -> Codes:
        """Returns [gate; up] as one matrix."""
        return join_rows(self.one(gate), self.one(up), self.report.folds, (gate.name, up.name))


class Requantized(Source):
    """Quantises weights again, gate and up as one. Weights that already have the format stay."""

    def scale_dtype(self, weights: Iterable[StoredWeight], format: str) -> torch.dtype:
        return FORMATS[format].scale_dtype

    def one(self, stored: StoredWeight) -> Codes:
        if stored.dialect.format == self.requantize:
            return super().one(stored)
        return self._quantize([stored])

    def pair(self, gate: StoredWeight, up: StoredWeight) -> Codes:
        if gate.dialect.format == up.dialect.format == self.requantize:
            return super().pair(gate, up)
        return self._quantize([gate, up])

    def _quantize(self, parts: list[StoredWeight]) -> Codes:
        values = torch.cat([part.dialect.values(part, self.read) for part in parts])
        format = self.format(parts[0])
        packed, block_scale, factor = torch.ops.fp4.quantize(values, format)
        again = torch.ops.fp4.dequantize(packed, block_scale, factor, format, torch.float32)
        error = ((again - values).norm() / values.norm()).nan_to_num(0.0).item()
        self.report.requantized = max(self.report.requantized, error)
        return Codes(packed, block_scale, factor if factor.numel() else None)


@dataclass
class Stack:
    """One weight [E, N, K] of an experts module, as codes and scales for the operators, in the plain
    layout.
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor | None
    format: str


def load_stack(
    parts: dict[Part, StoredWeight],
    shape: tuple[int, int, int],
    interleaved: bool,
    device: torch.device,
    source: Source,
    cut: Callable[[Codes, str], Codes] | None = None,
) -> Stack:
    """Reads each expert directly into its place. Experts that have no weights are zeros.

    `cut` cuts this process's part, of shape `shape`, from codes in a format.
    """
    format = source.format(next(iter(parts.values())))
    fmt, (e, n, k) = FORMATS[format], shape
    if (None, "") in parts:
        stack = source.one(parts[None, ""])
        if cut is not None:
            stack = cut(stack, format)
        factor = stack.global_scale
        if factor is not None:
            factor = factor.reshape(-1).expand(e).contiguous()
        return Stack(stack.packed, stack.block_scale, factor, format)
    dtype = source.scale_dtype(parts.values(), format)
    packed = torch.empty((e, n, k // 2), dtype=torch.uint8, device=device)
    block_scale = torch.empty((e, n, fmt.num_blocks(k)), dtype=dtype, device=device)
    global_scale = torch.ones((e,), dtype=torch.float32, device=device)
    for expert in range(e):
        if (expert, "") in parts:
            codes = source.one(parts[expert, ""])
        elif (expert, "gate") in parts:
            codes = source.pair(*(parts[expert, half] for half in HALVES))
            if interleaved:
                scale = codes.block_scale
                turned = interleave(scale.view(torch.uint8)[None])[0].view(scale.dtype)
                codes = Codes(interleave(codes.packed[None])[0], turned, codes.global_scale)
        else:
            packed[expert] = 0
            block_scale.view(torch.uint8)[expert] = 0
            continue
        if cut is not None:
            codes = cut(codes, format)
        packed[expert] = codes.packed
        block_scale.view(torch.uint8)[expert] = codes.block_scale.to(dtype).view(torch.uint8)
        if codes.global_scale is not None:
            global_scale[expert] = codes.global_scale
    return Stack(packed, block_scale, global_scale if fmt.has_global_scale else None, format)


def load_dense(placed: DensePlacement, device: torch.device, source: Source) -> nn.Parameter:
    """Makes an ordinary parameter from dequantised tensors, joined as the family stores them."""
    if (None, "") in placed.parts:
        return nn.Parameter(source.dense(placed.parts[None, ""], placed.dtype), requires_grad=False)
    whole = torch.empty(placed.shape, dtype=placed.dtype, device=device)
    form = placed.form
    for (expert, half), stored in placed.parts.items():
        assert expert is not None
        row = whole[expert]
        if form and form.transposed and row.dim() == 2:
            row = row.T
        if half:
            i = HALVES.index(half)
            row = row[i::2] if form and form.interleaved else row.chunk(2)[i]
        row.copy_(source.dense(stored, placed.dtype))
    return nn.Parameter(whole, requires_grad=False)


def stays_fp8(name: str, module: nn.Module, placed: DensePlacement) -> bool:
    """Returns whether a weight is that of a linear layer outside the experts, in fp8 as `save_pretrained`
    writes it: with a float32 scale for each row, as fp4::linears takes it."""
    stored = placed.parts.get((None, ""))
    if not isinstance(stored, StoredWeight) or stored.dialect.name != FLOAT8.name:
        return False
    scale = stored.block_scale
    by_rows = scale.dtype == torch.float32 and scale.shape == (placed.shape[0], 1)
    return by_rows and type(module) is nn.Linear and kind_of(name) is not None and ".experts." not in name


def load_fp8(module: nn.Module, placed: DensePlacement, read: Read) -> None:
    """Makes a linear layer compute with stored codes and scales."""
    stored: Any = placed.parts[None, ""]
    scale = read(stored.block_scale).reshape(-1)
    if not scale.isfinite().all():
        raise CheckpointError(f"fp4: {stored.block_scale} holds NaN or infinity. {DAMAGED}")
    weight = nn.Parameter(read(stored.packed), requires_grad=False)
    put_codes(cast(nn.Linear, module), weight, scale)


def load_linear(codes: Codes, format: str, dtype: torch.dtype, batch_invariant: bool = False) -> nn.Parameter:
    weight = FP4Tensor(codes.packed, codes.block_scale, codes.global_scale, format=format, dtype=dtype)
    n, k = weight.shape
    layout = preferred_layout(
        codes.packed.device.type, (n, k), dtype=dtype, format=format, a_format="auto",
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return nn.Parameter(weight.prepack(layout), requires_grad=False)


def detach_places(model: nn.Module, placement: Placement) -> None:
    """Removes the Parameters that are filled here, so that nothing else fills them.

    A weight that has its own tensors in the files is not tied to another one, even if the config says so: for
    example a 4-bit head beside bf16 embeddings.
    """
    places = [f"{n}.{a}" for name, p in placement.experts.items() for n in (name, *p.also) for a in p.shapes]
    places += [f"{n}.weight" for n in placement.linears]
    for place in {*places, *placement.dense}:
        owner, _, attribute = place.rpartition(".")
        module = model.get_submodule(owner)
        module._parameters[attribute] = None
        module._is_hf_initialized = True  # type: ignore[assignment]  # transformers: not at random
        untie(model, place)


def fill(
    model: nn.Module,
    placement: Placement,
    *,
    requantize: str | None,
    activation: str,
    trainable_inputs: bool,
    dtype: torch.dtype,
    device_of: Callable[[str], torch.device],
    batch_invariant: bool = False,
    progress: bool = True,
) -> LoadReport:
    """Loads the stored weights into the places that `detach_places` emptied.

    device_of: returns the device of a module by its name.
    """
    stored = [*_stored(placement)]
    formats = dict.fromkeys(requantize or w.dialect.format for w in stored if not w.dialect.is_dense)
    report = LoadReport(
        " and ".join(dict.fromkeys(w.dialect.name for w in stored)), " and ".join(formats),
        left=dict(placement.left),
    )  # fmt: skip
    total = sum(info.nbytes for w in stored for info in w.tensors)
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

        for name, dense in placement.dense.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            kept = has_kernel(device_of(owner)) and not (trainable_inputs or batch_invariant)
            if kept and stays_fp8(name, module, dense):
                load_fp8(module, dense, source(device_of(owner)).read)
                report.fp8.append(name)
                continue
            module._parameters[attribute] = load_dense(dense, device_of(owner), source(device_of(owner)))
            if any(isinstance(part, StoredWeight) for part in dense.parts.values()):
                report.dense.append(name)
        for name, placed in placement.experts.items():
            modules: list[Any] = [*dict.fromkeys(map(model.get_submodule, (name, *placed.also)))]
            device = device_of(name)
            stacks = {}
            for attribute, shape in placed.shapes.items():
                parts = {key[1:]: w for key, w in placed.parts.items() if key[0] == attribute}
                up = attribute == placed.form.gate_up
                turned = placed.form.interleaved and up
                cut = None
                if placed.part is not None and placed.part.kind == "split":
                    cut, shape = _cut(placed, up, shape)
                stacks[attribute] = load_stack(parts, shape, turned, device, source(device), cut)
            if placed.plan is not None:
                report.nbytes += _attach(
                    modules, placed, stacks, dtype, activation, trainable_inputs, device, report,
                    batch_invariant,
                )  # fmt: skip
            elif trainable_inputs:
                raise CheckpointError(
                    f"fp4: trainable_inputs=True, but {name} keeps its own code, which has no gradients: "
                    f"{placed.reason}. Load without it"
                )
            elif batch_invariant:
                raise CheckpointError(
                    f"fp4: batch_invariant=True, but {name} keeps its own code: {placed.reason}. Load "
                    "without it"
                )
            else:
                report.nbytes += _attach_tensors(modules, placed, stacks, dtype)
                report.own_code[name] = placed.reason
            report.experts.append(name)
        for name, linear in placement.linears.items():
            layer: Any = model.get_submodule(name)
            codes = source(device_of(name))
            layer.weight = load_linear(codes.one(linear), codes.format(linear), dtype, batch_invariant)
            report.linears.append(name)
            report.nbytes += layer.weight.nbytes
    choose_implementation(model)
    _keep_own_code(model, placement)
    if report.folds.rounded:
        warnings.warn(f"fp4: {report}", stacklevel=2)
    return report


def _cut(
    placed: ExpertsPlacement, up: bool, shape: tuple[int, int, int]
) -> tuple[Callable[[Codes, str], Codes], tuple[int, int, int]]:
    """Returns a function that cuts this process's columns from codes, and the shape of the whole weight."""
    part, inner = placed.part, placed.shapes[placed.form.down][2]
    assert part is not None
    e, n, k = shape

    def cut(codes: Codes, format: str) -> Codes:
        return columns(codes, up, inner, part, FORMATS[format].block, placed.form.interleaved)

    return cut, (e, n // part.size, k) if up else (e, n, k // part.size)


def _attach(
    modules: list[Any],
    placed: ExpertsPlacement,
    stacks: dict[str, Stack],
    dtype: torch.dtype,
    activation: str,
    trainable_inputs: bool,
    device: torch.device,
    report: LoadReport,
    batch_invariant: bool,
) -> int:
    """Gives the modules shared weights for `fp4::moe`. Returns the bytes of the weights."""
    assert placed.plan is not None
    weights = {
        attribute: PackedWeight(s.packed, s.block_scale, s.global_scale, s.format, "plain", part=placed.part)
        for attribute, s in stacks.items()
    }
    shared = SharedLayout(list(weights.values()), dtype, A_FORMATS[activation] or "auto", batch_invariant)
    if reason := shared.settle():
        report.plain[placed.name] = reason
    shared.join()
    check_activation_choice(activation, shared.weights[0].format)
    check_activation(activation, device.type, shared.weights[0].layout)
    for module in modules:
        for attribute, weight in weights.items():
            del module._parameters[attribute]
            module.add_module(attribute, weight)
        _finish(module, placed, activation, trainable_inputs)
    return sum(weight.num_bytes for weight in weights.values())


def _finish(module: Any, placed: ExpertsPlacement, activation: str, trainable_inputs: bool) -> None:
    """Makes a module with packed weights call `fp4::moe`."""
    assert placed.plan is not None
    if placed.part is not None:
        if trainable_inputs:
            raise CheckpointError(
                f"fp4: trainable_inputs=True, and {placed.name} has {placed.part}: gradients need all of "
                "them here"
            )
        keep_local(module)  # biases
        if placed.part.tokens:
            for name, bias in module._parameters.items():
                if bias is not None and bias.shape[0] == placed.part.experts:
                    own = bias.detach()[placed.part.own.start : placed.part.own.stop].clone()
                    module._parameters[name] = nn.Parameter(own, requires_grad=False)
        keep_for_itself(module)
    form = placed.plan.form.of(module)
    recipe = Recipe(form, placed.plan.gate, A_FORMATS[activation], trainable_inputs, placed.part)
    module._fp4_recipe = recipe
    take_new_weights(module)
    if trainable_inputs:
        module.requires_grad_(False)  # biases, too


def _attach_tensors(
    modules: list[Any], placed: ExpertsPlacement, stacks: dict[str, Stack], dtype: torch.dtype
) -> int:
    """Gives the modules FP4Tensors for their own code. Its products then call the operators."""
    nbytes = 0
    for attribute, s in stacks.items():
        tensor = FP4Tensor(
            s.packed, s.block_scale, s.global_scale, format=s.format, dtype=dtype,
            transposed=placed.form.transposed,
        )  # fmt: skip
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module in modules:
            module._parameters[attribute] = parameter
        nbytes += tensor.nbytes
    for module in modules:
        take_new_weights(module)
    return nbytes


def _keep_own_code(model: nn.Module, placement: Placement) -> None:
    """Lets modules without a plan run their own loop over experts. transformers' other implementations
    index weights in ways that FP4Tensor does not support."""
    for name, placed in placement.experts.items():
        module: Any = model.get_submodule(name)
        if placed.plan is None and hasattr(module, "config"):
            module._fp4_previous = "eager"
            if module.config._experts_implementation != IMPLEMENTATION:
                module.config._experts_implementation = "eager"


def _stored(placement: Placement) -> Iterable[StoredWeight]:
    for placed in placement.experts.values():
        yield from placed.parts.values()
    yield from placement.linears.values()
    for dense in placement.dense.values():
        yield from (part for part in dense.parts.values() if isinstance(part, StoredWeight))
