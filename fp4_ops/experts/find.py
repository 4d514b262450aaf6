"""Finds the modules of a transformers model that hold experts, and plans how they become `fp4::moe`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.parts import NoPart, Part, local, part_of
from ..meta.formats import ACTIVATIONS, SMALLEST_SIDE, Activation, activation_name, known_activation
from ..meta.gates import apply_gate
from .packed import ExpertsForm
from .zero3 import emptied

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# All experts modules of transformers use these names. `is_transposed` of the module gives the orientation.
GATED = ExpertsForm("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
UNGATED = ExpertsForm("up_proj", "down_proj", "up_proj_bias", "down_proj_bias")
OTHERWISE = (
    "torch.compile(model, backend='fp4') reads graphs, not modules, and may rewrite experts that prepare "
    "does not take, whole or in parts; fp4_ops.explain says what happens to them"
)
"""Advice where `prepare` does nothing."""
PREPARED = "it is prepared already"
AGAIN = "To prepare a model in another way, load the original again, and prepare that"
TOO_NARROW = (
    f"4 bits save little of matrices with a side below {SMALLEST_SIDE}. Adapters (LoRA) can be merged into "
    "the weights that they correct"
)


def named(given: object) -> str:
    """Returns how an error names an argument that should be a model, and may be the name of a folder."""
    return repr(given) if isinstance(given, (str, os.PathLike)) else f"a {type(given).__name__}"


def check_model(model: object) -> None:
    """Raises ValueError for what is no model, such as the name of a folder."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"fp4: model is {named(model)}; it must be a torch.nn.Module. Load a folder first: "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER), or fp4_ops.load_checkpoint(None, "
            "FOLDER) for one in 4 bits"
        )


def find_experts(
    model: nn.Module, lists: Collection[str] = (), unlike: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Any], dict[str, Plan], dict[str, str]]:
    """Returns three things: a model's experts modules by name, in order; the plan for each; and the reasons
    why some are left alone.

    lists: the lists whose experts are modules of their own.
    unlike: the reasons why other lists are left alone.

    Raises ValueError if there is nothing to do.
    """
    found: dict[str, Any] = {name: m for name, m in model.named_modules() if is_experts(m)}
    if not (found or lists or unlike):
        raise ValueError(
            "fp4: the model has no experts modules (transformers' Mixture-of-Experts layers, which hold 3D "
            f"expert weights, or a ModuleList `experts` of modules made of Linears). {OTHERWISE}"
        )
    plans: dict[str, Plan] = {}
    refusals: dict[str, str] = {}
    for name, module in found.items():
        try:
            plans[name] = plan(module)
        except Refusal as refusal:
            refusals[name] = str(refusal)
    if not plans and not lists:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in {**refusals, **unlike}.items())
        again = {*refusals.values(), *unlike.values()} == {PREPARED}
        raise ValueError(
            f"fp4: no experts module could be prepared:{reasons}\n{AGAIN if again else OTHERWISE}"
        )
    return found, plans, refusals


@dataclass(frozen=True)
class Plan:
    """Plan of `prepare` for one experts module."""

    form: ExpertsForm
    gate: str
    transposed: bool
    shape: str
    experts: int
    part: Part | None = None
    """This process's part, if it does not have all."""


class Refusal(Exception):
    """The reason why an experts module stays as it is."""


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module is under transformers' `use_experts_implementation`, by the attributes that
    the decorator sets."""
    marks = ("config", "has_gate", "has_bias", "is_transposed", "_apply_gate")
    return all(hasattr(module, mark) for mark in marks) and hasattr(type(module).forward, "__wrapped__")


def plan(module: Any) -> Plan:
    """Plans how an experts module becomes `fp4::moe`. Raises Refusal if it cannot."""

    def need(condition: bool, reason: str) -> None:
        if not condition:
            raise Refusal(reason)

    need(not hasattr(module, "_fp4_recipe"), PREPARED)
    need(not getattr(module, "has_post_expert_norm", False), "it has a norm after each expert")
    form = GATED if module.has_gate else UNGATED
    for name in (form.gate_up, form.down):
        need(module._parameters.get(name) is not None, f"it has no parameter {name}")
    transposed = module.is_transposed
    try:
        part = part_of(module, form.gate_up, form.down, (form.gate_up_bias, form.down_bias), transposed)
    except NoPart as reason:
        raise Refusal(f"{reason}; {WHOLE_EXPERTS}") from None
    up, down = (local(module._parameters[name]) for name in (form.gate_up, form.down))
    for name, w in ((form.gate_up, up), (form.down, down)):
        need(not emptied(w), f"{name} is {emptied(w)}")
        need(w.dim() == 3, f"{name} has {w.dim()} dimensions, not 3")
        need(w.dtype in SOURCE_DTYPES, f"{name} is {w.dtype}; it must be float32, bfloat16 or float16")
    (e, n13, h), (e2, n2, i) = logical_shape(up, transposed), logical_shape(down, transposed)
    rows = 2 * i if module.has_gate else i
    need(
        (e, n13, h) == (e2, rows, n2),
        f"{form.gate_up} {tuple(up.shape)} does not fit {tuple(down.shape)}",
    )
    need(h % 2 == 0 and i % 2 == 0, f"hidden size {h} or intermediate size {i} is odd")
    # A process that holds a part of each expert may have fewer columns than the expert.
    sides = (h,) if part is not None and part.kind == "split" else (h, i)
    need(min(sides) >= SMALLEST_SIDE, f"hidden size {h}, intermediate size {i}; {TOO_NARROW}")
    gate = recognise_gate(module)
    if gate is None:
        what = "gate" if module.has_gate else "activation, without gate,"
        raise Refusal(
            f"its {what} is none of fp4::moe's activations ({', '.join(ACTIVATIONS)}), clamped or not"
        )
    if part is not None and part.kind == "split" and known_activation(gate).interleaved:
        raise Refusal(f"its gate is interleaved, and the processes have parts of it; {WHOLE_EXPERTS}")
    held = f"{e} experts" if part is None else str(part)
    return Plan(form, gate, transposed, f"{held}, hidden {h}, intermediate {i}", e, part)


@dataclass(frozen=True)
class Form:
    """How an experts module stores its weights. Biases have the names of their weights and "_bias"."""

    gate_up: str
    down: str
    transposed: bool
    """True if weights are stored as [E, K, N]."""
    interleaved: bool
    """True if rows are in the order gate 0, up 0, gate 1, ... instead of all gates before all ups."""


def form_of(module: nn.Module) -> Form | None:
    """Returns how a module stores its two stacked expert weights. None for other modules."""
    for gate_up, halves in (("gate_up_proj", 2), ("up_proj", 1)):
        up, down = module._parameters.get(gate_up), module._parameters.get("down_proj")
        if up is None or down is None or up.dim() != 3 or down.dim() != 3:
            continue
        (_, a, b), (_, c, d) = up.shape, down.shape
        if not ((a, b) == (halves * d, c) or (b, a) == (halves * c, d)):
            continue
        transposed = bool(getattr(module, "is_transposed", (a, b) != (halves * d, c)))
        return Form(gate_up, "down_proj", transposed, not getattr(module, "is_concatenated", True))
    return None


WHOLE_EXPERTS = (
    "each process must hold all experts, or the part that transformers' tp_size or ep_size gives it "
    "(docs/several_gpus.md). Call fp4_ops.prepare before fully_shard or parallelize_module; "
    "prepare(model, ep_group=group) spreads whole experts"
)
"""Advice where a model is split over several processes."""


def plan_of(module: nn.Module) -> Plan:
    """Plans a module that may not belong to transformers' experts interface. Raises Refusal."""
    if not is_experts(module):
        raise Refusal("it is not an entry of transformers' experts interface")
    return plan(module)


def logical_shape(weight: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Returns [E, N, K], however the weight is stored."""
    e, a, b = weight.shape
    return (e, b, a) if transposed else (e, a, b)


def recognise_gate(module: Any) -> str | None:
    """Returns the activation of fp4::moe that computes the same as the module's own. To find it, the module's
    activation is run on test data.

    Its name is not enough, because only its code shows clamps, scales and the order of gate and up.
    """
    gated = getattr(module, "has_gate", True)
    own = module._apply_gate if gated else module.act_fn
    generator = torch.Generator().manual_seed(0)
    # Many small values distinguish erf from tanh, and some large ones reach every clamp.
    # Explicit values, because the defaults may be different while a model is built.
    here: Any = {"device": "cpu", "dtype": torch.float32}
    sizes = torch.cat([torch.logspace(-1, 1.3, 64, **here), torch.logspace(1.3, 5, 16, **here)])
    x = torch.randn(80, 128, generator=generator, **here) * sizes[:, None]
    try:
        with torch.no_grad():
            known = (a for a in ACTIVATIONS.values() if a.gated == gated)
            for activation in itertools.chain(known, _measured(own) if gated else ()):
                limit = activation.limit or 4.0
                if all(_agree(own, activation, values) for values in (x, x * (limit / 4))):
                    return activation_name(activation)
    except Exception:  # code that needs more is not a known activation
        return None
    return None


def _agree(own: Callable[[Tensor], Tensor], activation: Activation, x: Tensor) -> bool:
    want, got = own(x), apply_gate(x, activation)
    return got.shape == want.shape and torch.allclose(
        got, want, rtol=1e-4, atol=1e-5 * x[0].std().item() * 10
    )


def _measured(own: Callable[[Tensor], Tensor]) -> Iterator[Activation]:
    """Yields the gated activations, with the clamps of `own`.

    For a small gate g, the result is f(g) * (up + offset) with up clamped. Three values of up give f(g),
    offset and limit.
    """

    def at(gate: float, up: float, interleaved: bool) -> float:
        pair = torch.tensor([[gate, up]], dtype=torch.float64, device="cpu")
        # All columns of a part have the same value. Gate is the first half, or the even columns.
        wide = pair.repeat(1, 4) if interleaved else pair.repeat_interleave(4, dim=1)
        return own(wide).flatten()[0].item()

    for interleaved in (False, True):
        g, u = 2.0**-6, 2.0**-6  # within any clamp that a model would use
        base = at(g, 0.0, interleaved)
        slope = (at(g, u, interleaved) - base) / u
        if math.isfinite(slope) and slope > 0:
            limit = float(
                f"{(at(g, 1e9, interleaved) - base) / slope:.7g}"
            )  # measured values have an error of 1e-12
            rows = [a for a in ACTIVATIONS.values() if a.gated and a.interleaved == interleaved]
            yield from (replace(a, limit=limit) for a in rows if 0 < limit < 1e8)
