"""Packs the expert weights of a model in place: checks them, quantises them, and replaces them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import check_activation
from ..distributed.collectives import Group
from ..distributed.division import Division, top_k_of
from ..distributed.parts import Part, keep_for_itself, keep_local
from ..distributed.workspace import MAX_TOKENS
from ..experts import packed as experts
from ..experts.find import Plan, find_experts, is_experts, logical_shape
from ..experts.packed import PackedWeight, Recipe, SharedLayout, auto_a_format, interleave
from ..host_memory import return_freed_memory, use_huge_pages
from ..meta.formats import ACTIVATION_CHOICES, FORMATS, check_activation_choice, known_activation
from ..meta.layouts import LAYOUTS, packed_spec, preferred_layout
from ..quantization import Calibration, Method, find_method, quantize_weight
from ..quantization.weight import check_calibration, matrices_at_once, threads_of
from ..runtime.relayout import relayout
from .attention_plans import avoid_attention_plans
from .expert_lists import find_lists, linears, put, summary
from .expert_parallel import connect_model
from .head_rows import fold_head_rows
from .new_weights import take_new_weights
from .prepare_report import OWN_CODE, PreparedModule, PrepareReport

# The operators' `a_format` for each `activation`. None chooses by device at each run.
A_FORMATS = {name: None if name == "auto" else a_format for name, a_format in ACTIVATION_CHOICES.items()}


def pack_experts(
    model: nn.Module,
    format: str = "nvfp4",
    activation: str = "auto",
    *,
    method: str = "rtn",
    calibration: Calibration | None = None,
    trainable_inputs: bool = False,
    ep_group: Any = None,
    max_tokens: int = MAX_TOKENS,
    batch_invariant: bool = False,
) -> PrepareReport:
    """Does everything that `fp4_ops.prepare` does (same arguments), except the support for saving the
    model."""
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    check_activation_choice(activation, format)
    if max_tokens < 1:
        raise ValueError(f"fp4: max_tokens is {max_tokens}; it must be at least 1")
    chosen = find_method(method, format)
    lists, unlike = find_lists(model)
    found, plans, refusals = find_experts(model, lists, unlike)
    if ep_group is not None:
        plans = _spread(plans, lists, ep_group)
    for name, p in plans.items():
        _check_part(name, p, chosen, trainable_inputs)
    if lists:
        _check_lists(lists, activation, chosen, trainable_inputs)
    originals = {
        name: keep_local(found[name], p.part if p.part and p.part.tokens else None)
        for name, p in plans.items()
    }
    wanted = A_FORMATS[activation] or "auto"
    try:
        for name, p in plans.items():
            _check_weights(name, found[name], p, format)
        device, dtype, shapes = _weights(found, plans, lists)
        layout = preferred_layout(
            device, *shapes, dtype=dtype, format=format, a_format=wanted, batch_invariant=batch_invariant
        )
        check_activation(activation, device, layout)
        quantizer = Quantizer(format, chosen, calibration, layout)
        for name, p in plans.items():
            quantizer.check(name, found[name], p)
    except Exception:
        for name, parameters in originals.items():
            found[name]._parameters.update(parameters)
        raise
    originals.clear()
    sizes = _replace_weights(found, plans, quantizer)
    of_lists = _replace_linears(lists, quantizer)
    for name, p in plans.items():
        finish_module(found[name], p, activation, trainable_inputs, dtype, batch_invariant)
    if plans:
        choose_implementation(model)
    if device == "cpu":
        return_freed_memory()

    a_format = chosen_a_format(activation, device, layout) if plans else "none"
    exchange = connect_model(model, dtype, max_tokens)
    report = PrepareReport(
        format, layout, a_format, exchange=exchange, division=_division(model, found, plans)
    )
    for name in found:
        if name in plans:
            before, after = sizes[name]
            report.modules.append(
                PreparedModule(name, "", plans[name].gate, plans[name].shape, before, after)
            )
        else:
            report.modules.append(PreparedModule(name, refusals[name]))
    for name, modules in lists.items():
        report.modules.append(PreparedModule(name, "", OWN_CODE, summary(modules), *of_lists[name]))
    report.modules += [PreparedModule(name, reason) for name, reason in unlike.items()]
    return report


def chosen_a_format(activation: str, device: str, layout: str) -> str:
    """Returns the format of the activations in products of packed experts, as reports say it."""
    return A_FORMATS[activation] or f"{auto_a_format(device, layout)} (auto)"


def finish_module(
    module: Any,
    p: Plan,
    activation: str,
    trainable_inputs: bool,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> None:
    """Makes an experts module with packed weights run in 4 bits."""
    module._fp4_recipe = Recipe(p.form.of(module), p.gate, A_FORMATS[activation], trainable_inputs, p.part)
    if trainable_inputs:
        module.requires_grad_(False)  # biases, too
    if p.part is not None:
        keep_for_itself(module)
    weights = [getattr(module, p.form.gate_up), getattr(module, p.form.down)]
    SharedLayout(weights, dtype, A_FORMATS[activation] or "auto", batch_invariant).join()
    take_new_weights(module)


def _division(model: nn.Module, found: dict[str, nn.Module], plans: dict[str, Plan]) -> str:
    """Describes how processes with the same tokens share the experts of the first module that they share.

    Returns "" if they share none.
    """
    top_k = top_k_of(model)
    for name, p in plans.items():
        if p.part is None or p.part.tokens == "own" or top_k is None:
            continue
        up, down = (getattr(found[name], n) for n in (p.form.gate_up, p.form.down))
        shares = p.part.size if p.part.kind == "split" else 1
        weight_bytes = shares * (up.num_bytes + down.num_bytes) / len(p.part.own)
        sizes = Division(p.part.experts, top_k, p.part.size, up.k, shares * down.k, weight_bytes)
        return sizes.told(p.part.kind)
    return ""


def _spread(plans: dict[str, Plan], lists: dict[str, Any], ep_group: Any) -> dict[str, Plan]:
    """Returns the same plans for this process's share of whole experts."""
    if lists:
        raise ValueError(
            f"fp4: ep_group is given, and the experts of {next(iter(lists))} are modules of their own, "
            "which run by their own code. Call prepare without it"
        )
    size, rank, spread = ep_group.size(), ep_group.rank(), {}
    for name, p in plans.items():
        if p.part is not None:
            raise ValueError(
                f"fp4: ep_group is given, and {name} has {p.part} already, as DTensors. Call prepare "
                "without it"
            )
        part = Part("spread", p.experts, size, rank, ep_group.group_name, "own")
        shape = p.shape.partition(", ")[2]
        spread[name] = replace(p, part=part, shape=f"{part}, {shape}")
    return spread


def _check_part(name: str, p: Plan, method: Method, trainable_inputs: bool) -> None:
    """Raises ValueError for arguments that do not work with experts spread or split over processes."""
    if p.part is None:
        return
    if trainable_inputs:
        raise ValueError(
            f"fp4: trainable_inputs=True, and {name} has {p.part}: gradients need all of them here. "
            "Call prepare in one process, or without trainable_inputs"
        )
    if method.calibration != "none" or (p.part.kind == "split" and method.name != "rtn"):
        raise ValueError(f"fp4: method is {method.name!r}, and {name} has {p.part}. Use method='rtn'")


def _weights(
    found: dict[str, Any], plans: dict[str, Plan], lists: dict[str, list[nn.Module]]
) -> tuple[str, torch.dtype, set[tuple[int, int]]]:
    """Returns device and dtype of the expert weights, and their (N, K). Keeps no reference, because
    prepare frees them."""
    shapes = set()
    for name, of_list in lists.items() if not plans else ():
        for _, linear in linears(name, of_list):
            weight = linear.weight
            shapes.add((weight.shape[0], weight.shape[1]))
    for name, p in plans.items():
        for _, attribute in p.form.weights:
            weight = getattr(found[name], attribute)
            _, n, k = logical_shape(weight, p.transposed)
            shapes.add((n, k))
    return weight.device.type, weight.dtype, shapes


def _check_lists(
    lists: dict[str, list[nn.Module]], activation: str, method: Method, trainable_inputs: bool
) -> None:
    """Checks lists of experts for everything that they do not support, before anything is changed."""
    name = next(iter(lists))
    own_code = f"the experts of {name} are modules that keep their own code, with FP4Tensors as weights"
    if activation not in ("auto", "bf16"):
        raise ValueError(
            f"fp4: activation is {activation!r}, and {own_code}, whose activations stay as they are. Use "
            f"activation='bf16', and torch.compile(model, backend='fp4', options={{'activation': "
            f"{activation!r}}})"
        )
    if method.calibration != "none":
        raise ValueError(f"fp4: method {method.name!r} needs calibration, and {own_code}. Use method='rtn'")
    if trainable_inputs:
        raise ValueError(
            f"fp4: trainable_inputs=True, and {own_code}, which have no gradients. Leave trainable_inputs out"
        )
    for name, modules in lists.items():
        for weight_name, linear in linears(name, modules):
            if linear.weight.is_meta:
                raise ValueError(f"fp4: {weight_name} {_not_loaded(linear)}")
            if not linear.weight.isfinite().all():
                raise ValueError(
                    f"fp4: {weight_name} holds NaN or infinity, which have no 4-bit code. Correct it "
                    "before prepare"
                )


def _replace_linears(lists: dict[str, list[nn.Module]], quantizer: Quantizer) -> dict[str, tuple[int, int]]:
    """Packs the weight of each Linear of experts: {list: (bytes before, bytes after)}.

    Several Linears may share a Parameter. It is packed once, counted for the first of them, and freed before
    the next.
    """
    places: dict[Tensor, list[tuple[str, nn.Linear]]] = {}
    for name, modules in lists.items():
        for _, linear in linears(name, modules):
            places.setdefault(linear.weight, []).append((name, linear))
    sizes = dict.fromkeys(lists, (0, 0))
    while places:
        weight = next(iter(places))
        (name, first), *others = places.pop(weight)
        with torch.inference_mode(False), torch.no_grad():
            codes = quantizer.quantize(weight.detach()[None], None)
            size = put(
                first, codes, quantizer.format, quantizer.method.name,
                batch_invariant=LAYOUTS[quantizer.layout].batch_invariant,
            )  # fmt: skip
        for _, other in others:
            other.weight = first.weight
        before, after = sizes[name]
        sizes[name] = (before + weight.nbytes, after + size)
        del weight
    return sizes


def _check_weights(name: str, module: nn.Module, p: Plan, format: str) -> None:
    """Checks everything that could fail half-way, before anything is changed."""
    if p.part is not None and p.part.kind == "split":
        inner = logical_shape(getattr(module, p.form.down), p.transposed)[2]
        check_columns(name, p.part, inner * p.part.size, format)
    for attribute in (p.form.gate_up, p.form.down):
        weight = getattr(module, attribute)
        if weight.is_meta:
            raise ValueError(f"fp4: {name}.{attribute} {_not_loaded(module)}")
        check_finite(f"{name}.{attribute}", weight.detach())


def _not_loaded(module: nn.Module) -> str:
    """Says why a weight is on the meta device, and what to do."""
    if not hasattr(module, "_hf_hook"):
        return "is on the meta device; load the weights before prepare"
    return (
        "is on the meta device, because accelerate offloads its module (device_map). For experts that exceed "
        "the GPU load the model without a device_map, then call prepare with gpu_memory='20GiB', or as much "
        "as you like: it moves all but the experts to the GPU"
    )


def check_finite(name: str, weight: Tensor) -> None:
    """Raises ValueError for a weight [E, ...] that cannot be quantised."""
    for expert, matrix in enumerate(weight):
        if not matrix.isfinite().all():
            raise ValueError(
                f"fp4: {name} holds NaN or infinity in expert {expert}, "
                "which have no 4-bit code. Correct it before prepare"
            )


def check_columns(name: str, part: Part, inner: int, format: str) -> None:
    """Raises ValueError unless each process's columns of the intermediate size are whole blocks."""
    block = FORMATS[format].block
    if inner % part.size or inner // part.size % block:
        raise ValueError(
            f"fp4: {name} has intermediate size {inner}, which {part.size} processes split (tp_size); "
            f"each part must be a multiple of {block}, the block of {format}. Use another tp_size or format, "
            "or ep_size, which keeps experts whole"
        )


@dataclass(frozen=True)
class Quantizer:
    """Quantises expert weights to 4 bits for `prepare`."""

    format: str
    method: Method
    calibration: Calibration | None
    layout: str

    def check(self, name: str, module: Any, p: Plan) -> None:
        """Raises ValueError if the calibration does not fit this module."""
        if self.method.calibration == "none":
            return
        for matrix, attribute in p.form.weights:
            shape = logical_shape(getattr(module, attribute), p.transposed)
            given = self.calibration.shape(name, matrix) if self.calibration else None
            check_calibration(shape, self.method, given)

    def _moments(self, name: str, matrix: str) -> Tensor | None:
        if self.method.calibration == "none" or self.calibration is None:
            return None
        return self.calibration.get(name, matrix)

    def pack(
        self, weight: Tensor, name: str, matrix: str, *, transposed: bool = False, interleaved: bool = False,
        part: Part | None = None,
    ) -> PackedWeight:  # fmt: skip
        """Packs the weight [E, N, K] (stored [E, K, N] if transposed), a few experts at a time.

        `interleaved`: rows of gate and up alternate. `part`: the process's part, if `weight` is only a part.
        The part of a split weight gets the codes that it would have in the whole weight.
        """
        moments = self._moments(name, matrix)
        # Make no inference tensors, because these could not be loaded into or moved later.
        with torch.inference_mode(False), torch.no_grad():
            weight = weight.detach()
            factors = self._factors(weight, part) if part is not None and part.kind == "split" else None
            e, n, k = logical_shape(weight, transposed)
            spec = packed_spec(FORMATS[self.format], LAYOUTS[self.layout], (e,), n, k)
            stacks = [use_huge_pages(weight.new_empty(shape, dtype=dtype)) for shape, dtype in spec]
            at_once = matrices_at_once(weight.device.type, n, k)
            if self.method.name != "rtn":  # the kernel of rtn uses threads itself
                at_once *= threads_of(weight.device)
            for start in range(0, e, at_once):
                at = slice(start, start + at_once)
                matrices = weight[at].transpose(1, 2).contiguous() if transposed else weight[at]
                inputs = moments[at] if moments is not None else None
                if interleaved:
                    matrices = interleave(matrices)
                made_here = self.quantize(matrices, inputs, factors[at] if factors is not None else None)
                operands = relayout(made_here, self.format, k, "plain", self.layout)
                for stack, made in zip(stacks, operands):
                    stack[at] = made  # type: ignore[assignment]
        global_scale = stacks[2] if len(stacks) == 3 else None
        return PackedWeight(
            stacks[0], stacks[1], global_scale, self.format, self.layout, k, interleaved, part,
            self.method.name,
        )  # fmt: skip

    def _factors(self, weight: Tensor, part: Part) -> Tensor | None:
        """Returns the global scales [E] of weights that are split over processes. They are equal on all."""
        if not FORMATS[self.format].has_global_scale:
            return None
        largest = weight.abs().amax((1, 2)).float().contiguous()
        largest = Group.named("fp4_ops.prepare", part.group_name).largest(largest)
        return torch.where(largest == 0, 1.0, largest / (6 * 448))

    def quantize(
        self, w: Tensor, moments: Tensor | None, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantises w. factors: the global scales [E]; None computes them from w."""
        if self.method.name == "rtn":  # a kernel gives the same bits
            codes: tuple[Tensor, Tensor, Tensor] = torch.ops.fp4.quantize(w, self.format, factors)
            return codes
        return quantize_weight(w, self.format, self.method.name, calibration=moments)


def _replace_weights(
    found: dict[str, Any], plans: dict[str, Plan], quantizer: Quantizer
) -> dict[str, tuple[int, int]]:
    """Replaces each Parameter by a PackedWeight: {module: (bytes before, bytes after)}.

    Several modules may share a Parameter. It is packed once, counted for the first of them, and its last
    reference is dropped before the next Parameter. Calibrated methods run the model in between, so with these
    all are packed before the first is replaced.
    """
    places: dict[Tensor, list[tuple[str, str, str]]] = {}
    for name, p in plans.items():
        for matrix, attribute in p.form.weights:
            places.setdefault(getattr(found[name], attribute), []).append((name, matrix, attribute))

    def pack(weight: Tensor) -> PackedWeight:
        name, matrix, _ = places[weight][0]
        act = known_activation(plans[name].gate)
        split = matrix == "gate_up" and act.gated and not act.interleaved
        return quantizer.pack(
            weight, name, matrix, transposed=plans[name].transposed,
            interleaved=split and LAYOUTS[quantizer.layout].interleaved, part=plans[name].part,
        )  # fmt: skip

    early = {w: pack(w) for w in places} if quantizer.method.calibration != "none" else {}
    sizes = dict.fromkeys(plans, (0, 0))
    while places:
        weight = next(iter(places))
        packed = early.pop(weight) if early else pack(weight)
        users = places.pop(weight)
        first = users[0][0]
        before, after = sizes[first]
        sizes[first] = (before + weight.nbytes, after + packed.num_bytes)
        for name, _, attribute in users:
            delattr(found[name], attribute)
            found[name].add_module(attribute, packed)
        del weight
    return sizes


def own_configs(model: nn.Module) -> None:
    """Gives the model copies of its configs: other models may have been built from the same objects."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if "config" in module.__dict__:
            module.config = copy.deepcopy(module.config, copies)


def choose_implementation(model: nn.Module) -> None:
    """Sets `fp4` on the config that modules share. Modules that are left alone note what they ran before.

    generate() switches `grouped_mm` to another implementation for decoding, but does not change a name that
    it does not know.
    """
    experts.register()
    fold_head_rows(model)
    avoid_attention_plans(model)
    modules: list[Any] = [m for m in model.modules() if is_experts(m)]
    if any(hasattr(m, "_fp4_recipe") for m in modules):
        own_configs(model)
    for module in modules:
        previous = module.config._experts_implementation
        if not hasattr(module, "_fp4_recipe") and previous != experts.IMPLEMENTATION:
            module._fp4_previous = previous or "eager"
    for module in modules:
        if hasattr(module, "_fp4_recipe"):
            module.config._experts_implementation = experts.IMPLEMENTATION
