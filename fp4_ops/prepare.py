"""`prepare`: swaps the expert weights of a model for 4-bit ones, in place, and frees the originals."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import experts
from .experts import ExpertsForm, PackedWeight, Recipe, auto_a_format
from .meta.formats import ACTIVATIONS, FORMATS, Activation
from .meta.layouts import preferred_layout

# What `activation` means to the operators; None: by device, when it runs.
_A_FORMATS = {"auto": None, "bf16": "none", "int8": "int8"}
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# transformers' experts modules all name their weights so; is_transposed on the module says the rest.
FORMS = (ExpertsForm("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),)


@dataclass(frozen=True)
class PreparedModule:
    """One experts module: prepared if `reason` is empty, else left as it was because of it."""

    name: str
    reason: str = ""
    gate: str = ""
    shape: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    """0 for weights that an earlier module shares."""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: left alone: {self.reason}"
        sizes = f"{_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"
        return f"{self.name}: {self.shape}, gate {self.gate}, {sizes}"


@dataclass
class PrepareReport:
    """What `prepare` did with each experts module of a model."""

    format: str
    layout: str
    activations: str
    modules: list[PreparedModule] = field(default_factory=list)

    @property
    def prepared(self) -> list[PreparedModule]:
        return [m for m in self.modules if not m.reason]

    @property
    def bytes_before(self) -> int:
        return sum(m.bytes_before for m in self.prepared)

    @property
    def bytes_after(self) -> int:
        return sum(m.bytes_after for m in self.prepared)

    def __str__(self) -> str:
        done, left = len(self.prepared), len(self.modules) - len(self.prepared)
        head = f"prepared {done} experts modules, {left} left alone: {self.format}, layout {self.layout}, "
        total = f"expert weights {_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"
        return "\n".join([head + f"activations {self.activations}", *(f"  {m}" for m in self.modules), total])


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"


def prepare(model: nn.Module, format: str = "nvfp4", activation: str = "auto") -> PrepareReport:
    """Replaces the expert weights of a transformers model by 4-bit ones, in place; the originals are freed.

    Afterwards every experts module calls `torch.ops.fp4.moe`, in eager mode, under torch.compile,
    torch.export and generate() alike. Weights are taken one expert at a time, so the extra memory needed
    meanwhile is less than one weight tensor.

    model: a model, or a part of one, with transformers experts modules; weights float32, bfloat16 or float16.
    format: "nvfp4" or "mxfp4".
    activation: how activations enter the products. "bf16" leaves them in the model's dtype, "int8" quantises
        them in blocks of 32 (CPU only), "auto" is int8 on a CPU and the model's dtype elsewhere.

    Returns a report with one entry for each experts module; those that fp4::moe cannot express are left
    alone and keep running as before, with the reason in the report. Raises ValueError if nothing could be
    prepared, if weights are on the meta device or hold NaN or infinity; the model is then unchanged.
    """
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    if activation not in _A_FORMATS:
        raise ValueError(f"fp4: activation is {activation!r}; it must be one of: {', '.join(_A_FORMATS)}")
    found: dict[str, Any] = {name: m for name, m in model.named_modules() if is_experts(m)}
    if not found:
        raise ValueError(
            "fp4: the model has no experts modules (transformers' Mixture-of-Experts layers, which hold 3D "
            "expert weights). Use torch.compile(model, backend='fp4') for other code."
        )
    plans: dict[str, Plan] = {}
    refusals: dict[str, str] = {}
    for name, module in found.items():
        try:
            plans[name] = plan(module)
        except _Refusal as refusal:
            refusals[name] = str(refusal)
    if not plans:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals.items())
        raise ValueError(f"fp4: no experts module could be prepared:{reasons}")
    for name, p in plans.items():
        _check_weights(name, found[name], p)
    device = getattr(found[next(iter(plans))], next(iter(plans.values())).form.down).device.type
    if activation == "int8" and device != "cpu":
        raise ValueError(
            f"fp4: activation='int8' runs on CPU only; the model is on {device}. "
            "Use activation='bf16' or 'auto'."
        )

    layout = preferred_layout(device)
    sizes = _replace_weights(found, plans, format, layout)
    for name, p in plans.items():
        found[name]._fp4_recipe = Recipe(p.form, p.gate, _A_FORMATS[activation])
    _choose_implementation(found, plans)
    if device == "cpu":
        _return_freed_memory()

    a_format = _A_FORMATS[activation] or f"{auto_a_format(device)} (auto)"
    report = PrepareReport(format, layout, a_format)
    for name in found:
        if name in plans:
            before, after = sizes[name]
            report.modules.append(
                PreparedModule(name, "", plans[name].gate, plans[name].shape, before, after)
            )
        else:
            report.modules.append(PreparedModule(name, refusals[name]))
    return report


def _return_freed_memory() -> None:
    """glibc keeps freed blocks below its mmap threshold, up to 32 MiB each, unless asked to return them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class Plan:
    """What `prepare` will do with one experts module."""

    form: ExpertsForm
    gate: str
    transposed: bool
    shape: str


class _Refusal(Exception):
    """Why an experts module stays as it is."""


def is_experts(module: nn.Module) -> bool:
    """A module under transformers' `use_experts_implementation`, known by what the decorator leaves on it."""
    marks = ("config", "has_gate", "has_bias", "is_transposed", "_apply_gate")
    return all(hasattr(module, mark) for mark in marks) and hasattr(type(module).forward, "__wrapped__")


def plan(module: Any) -> Plan:
    """How an experts module becomes `fp4::moe`. Raises _Refusal where it cannot."""

    def need(condition: bool, reason: str) -> None:
        if not condition:
            raise _Refusal(reason)

    need(not hasattr(module, "_fp4_recipe"), "it is prepared already")
    need(module.has_gate, "its experts have no gate; fp4::moe computes gate and up")
    need(not getattr(module, "has_post_expert_norm", False), "it has a norm after each expert")
    forms = [f for f in FORMS if f.gate_up in module._parameters and f.down in module._parameters]
    need(bool(forms), f"its weights are not the parameters {' or '.join(f.gate_up for f in FORMS)} and down")
    form = forms[0]
    up, down = module._parameters[form.gate_up], module._parameters[form.down]
    for name, w in ((form.gate_up, up), (form.down, down)):
        need(w.dim() == 3, f"{name} has {w.dim()} dimensions, not 3")
        need(w.dtype in SOURCE_DTYPES, f"{name} is {w.dtype}; it must be float32, bfloat16 or float16")
    (e, n13, h), (e2, n2, i) = (
        _logical_shape(up, module.is_transposed),
        _logical_shape(down, module.is_transposed),
    )
    need((e, n13, h) == (e2, 2 * i, n2), f"{form.gate_up} {tuple(up.shape)} does not fit {tuple(down.shape)}")
    need(h % 2 == 0 and i % 2 == 0, f"hidden size {h} or intermediate size {i} is odd")
    gate = recognise_gate(module)
    if gate is None:
        raise _Refusal(f"its gate is none of fp4::moe's activations ({', '.join(ACTIVATIONS)})")
    return Plan(form, gate, module.is_transposed, f"{e} experts, hidden {h}, intermediate {i}")


def _logical_shape(weight: Tensor, transposed: bool) -> tuple[int, int, int]:
    """[E, N, K], however it is stored."""
    e, a, b = weight.shape
    return (e, b, a) if transposed else (e, a, b)


def recognise_gate(module: Any) -> str | None:
    """The entry of ACTIVATIONS that computes what the module's own gate does, found by trying them on data.

    A name would not do: clamps, scales and the order of gate and up are all in the code.
    """
    generator = torch.Generator().manual_seed(0)
    # A few large values reach every clamp, most small ones tell erf from tanh.
    x = torch.randn(64, 128, generator=generator) * torch.logspace(-1, 1.3, 64)[:, None]
    try:
        with torch.no_grad():
            want = module._apply_gate(x)
    except Exception:  # whatever it needs, it is not the gate we know
        return None
    for name, activation in ACTIVATIONS.items():
        got = apply_gate(x, activation)
        if got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5):
            return name
    return None


_CURVES = {
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def apply_gate(x: Tensor, activation: Activation) -> Tensor:
    """f(gate) * (up + up_offset) in plain torch, as meta.formats.Activation defines it."""
    gate, up = (x[..., ::2], x[..., 1::2]) if activation.interleaved else x.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    curve = _CURVES.get(activation.name, lambda gate: gate * torch.sigmoid(activation.alpha * gate))
    return curve(gate) * (up + activation.up_offset)


def _check_weights(name: str, module: nn.Module, p: Plan) -> None:
    """Everything that could fail half-way, before anything is changed."""
    for attribute in (p.form.gate_up, p.form.down):
        weight = getattr(module, attribute)
        if weight.is_meta:
            raise ValueError(
                f"fp4: {name}.{attribute} is on the meta device; load the weights before prepare"
            )
        for expert, matrix in enumerate(weight.detach()):
            if not matrix.isfinite().all():
                raise ValueError(f"fp4: {name}.{attribute} holds NaN or infinity in expert {expert}")


def _replace_weights(
    found: dict[str, Any], plans: dict[str, Plan], format: str, layout: str
) -> dict[str, tuple[int, int]]:
    """Puts a PackedWeight in place of each Parameter: {module: (bytes before, bytes after)}.

    A Parameter may serve several modules. Each is packed once, counted where it comes first, and its last
    reference is dropped before the next one is touched.
    """
    places: dict[Tensor, list[tuple[str, str]]] = {}
    for name, p in plans.items():
        for attribute in (p.form.gate_up, p.form.down):
            places.setdefault(getattr(found[name], attribute), []).append((name, attribute))
    sizes = dict.fromkeys(plans, (0, 0))
    while places:
        weight = next(iter(places))
        users = places.pop(weight)
        first = users[0][0]
        packed = pack(weight, format, layout, transposed=plans[first].transposed)
        before, after = sizes[first]
        sizes[first] = (before + weight.nbytes, after + packed.num_bytes)
        for name, attribute in users:
            delattr(found[name], attribute)
            found[name].add_module(attribute, packed)
        del weight
    return sizes


def pack(weight: Tensor, format: str, layout: str, *, transposed: bool = False) -> PackedWeight:
    """Quantises [E, N, K] (stored [E, K, N] if transposed) one expert at a time."""
    fmt = FORMATS[format]
    # No inference tensors: they could not be loaded into or moved later.
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach()
        e, n, k = _logical_shape(weight, transposed)
        packed = weight.new_empty((e, n, k // 2), dtype=torch.uint8)
        block_scale = weight.new_empty((e, n, fmt.num_blocks(k)), dtype=fmt.scale_dtype)
        global_scale = weight.new_empty((e,), dtype=torch.float32) if fmt.has_global_scale else None
        for i in range(e):
            matrix = weight[i].T.contiguous() if transposed else weight[i]
            codes, scales, factor = torch.ops.fp4.quantize(matrix, format)
            if layout != "plain":
                codes, scales = torch.ops.fp4.prepack(codes, scales, format, layout)
            packed[i], block_scale[i] = codes, scales
            if global_scale is not None:
                global_scale[i] = factor
    return PackedWeight(packed, block_scale, global_scale, format, layout)


def _choose_implementation(found: dict[str, Any], plans: dict[str, Plan]) -> None:
    """Sets `fp4` on the config, which modules share: those left alone note what they ran before.

    generate() leaves a name that it does not know in place, where it would switch `grouped_mm` for decoding.
    """
    experts.register()
    for name, module in found.items():
        previous = module.config._experts_implementation
        if name not in plans and previous != experts.IMPLEMENTATION:
            module._fp4_previous = previous or "eager"
    for name in plans:
        found[name].config._experts_implementation = experts.IMPLEMENTATION
