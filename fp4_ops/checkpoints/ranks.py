"""Divides 4-bit folders over several processes: which experts, or columns of them, this process reads.

transformers shards the parameters that it loads itself by the model's plans. This package reads 4-bit
weights, so this file applies the same plans to them. transformers' hooks around the experts then add up the
results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.collectives import Group
from ..distributed.parts import Part
from ..models.pack_experts import check_columns
from .dialects import Codes, StoredWeight
from .files import CheckpointError, TensorInfo
from .placement import DensePlacement, ExpertsPlacement, Placement

WHOLE_STYLES = {"mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"}
"""transformers' styles that leave a parameter whole."""
ADVICE = "Load the folder without tp_size, or with a tp_plan that leaves it out"


def kinds_of(model: Any, placement: Placement) -> dict[str, str]:
    """Returns how transformers will divide each experts module of the placement: "spread" or "split".
    Modules that stay whole are left out. Raises ValueError for any other division."""
    config: Any = getattr(model.config, "distributed_config", None)
    # transformers 5.17 has no ep_size, and None for a size that is not given.
    if all((getattr(config, name, None) or 1) == 1 for name in ("tp_size", "ep_size")):
        return {}
    if config.dp_size > 1 and config.tp_size > 1:
        raise ValueError(
            f"fp4: fsdp_size or dp_replicate_size is above 1 beside tp_size {config.tp_size}; 4-bit "
            f"folders take one "
            "of them alone, or fsdp_size with ep_size"
        )
    tp, ep, _ = model._resolve_parallel_plans(config)
    kinds = {}
    for name, placed in placement.experts.items():
        if kind := _kind(name, placed, tp, ep, config):
            kinds[name] = kind
            _check(name, placed, model.get_submodule(name), kind, config)
    for name in [f"{n}.weight" for n in placement.linears] + [*placement.dense]:
        owner = name.rpartition(".")[0]
        style = tp.get(name) or ep.get(name)
        if style and style not in WHOLE_STYLES and kinds.get(owner) != "spread":
            raise ValueError(
                f"fp4: {name} is stored in 4 or 8 bits, and the plan divides it ({style!r}). {ADVICE}"
            )
    return kinds


def _kind(name: str, placed: ExpertsPlacement, tp: dict[str, str], ep: dict[str, str], config: Any) -> str:
    rules = {
        "spread": (ep, "ep_dispatch_experts", dict.fromkeys(placed.shapes, "grouped_gemm")),
        "split": (tp, "moe_tp_experts", {placed.form.gate_up: "packed_colwise", placed.form.down: "rowwise"}),
    }
    for kind, (plan, outside, inside) in rules.items():
        styles = {attribute: plan.get(f"{name}.{attribute}") for attribute in placed.shapes}
        around = plan.get(name)
        if around is None and not any(styles.values()):
            continue
        if kind == "split" and placed.form.gate_up == "up_proj":
            inside[placed.form.gate_up] = "colwise"
        if around != outside or styles != inside:
            said = ", ".join(f"{a} {s!r}" for a, s in {"": around, **styles}.items() if s)
            raise ValueError(
                f"fp4: the plan divides {name} by {said}; 4-bit experts take {outside!r} around "
                + ", ".join(f"{a} {s!r}" for a, s in inside.items())
            )
        return kind
    return ""


def _check(name: str, placed: ExpertsPlacement, module: nn.Module, kind: str, config: Any) -> None:
    if placed.plan is None:
        raise ValueError(
            f"fp4: {name} is divided over processes, and it runs by its own code over whole experts: "
            f"{placed.reason}. "
            "Load the folder without ep_size and tp_size"
        )
    if kind == "spread" and placed.experts % config.ep_size:
        raise ValueError(
            f"fp4: {name} has {placed.experts} experts; ep_size is {config.ep_size} and must divide them"
        )
    if kind == "split":
        biases = [n for n, p in module._parameters.items() if p is not None and n not in placed.shapes]
        if biases:
            raise ValueError(
                f"fp4: {name} is split over processes (tp_size), and {biases[0]} is a bias, which each "
                "would add. Use ep_size"
            )
        part, inner = Part("split", placed.experts, config.tp_size, 0, ""), placed.shapes[placed.form.down][2]
        for format in {w.dialect.format for w in placed.parts.values()}:
            check_columns(name, part, inner, format)


def announce(model: Any, placement: Placement, kinds: dict[str, str]) -> None:
    """Sets the number of experts of this process on each module. transformers' hooks around the experts
    ask for it."""
    for name, kind in kinds.items():
        if kind == "spread":
            size = model.config.distributed_config.ep_size
            model.get_submodule(name).num_experts = placement.experts[name].experts // size


def divide(model: Any, placement: Placement, kinds: dict[str, str], ep_group: str | None) -> None:
    """Reduces the placement to what this process reads."""
    for name, placed in placement.experts.items():
        if ep_group is not None:
            group = Group.named("fp4_ops.load_checkpoint", ep_group)
            placed.part = Part("spread", placed.experts, group.size, group.rank, ep_group, "own")
        elif kind := kinds.get(name):
            mesh = model._mesh_manager.get_mesh({"spread": "ep", "split": "tp"}[kind])
            where = mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name
            placed.part = Part(kind, placed.experts, *where)
        if placed.part is not None and placed.part.kind == "spread":
            _spread(placed, placed.part)
            for dense_name, dense in placement.dense.items():
                if dense_name.rpartition(".")[0] == name:
                    _spread(dense, placed.part)


def _spread(placed: ExpertsPlacement | DensePlacement, part: Part) -> None:
    own = part.own
    if isinstance(placed, ExpertsPlacement):
        placed.experts = len(own)
        placed.shapes = {a: (len(own), n, k) for a, (_, n, k) in placed.shapes.items()}
        placed.parts = {
            (attribute, None if e is None else e - own.start, half): _rows(w, own, part.experts)
            if e is None
            else w
            for (attribute, e, half), w in placed.parts.items()
            if e is None or e in own
        }
        return
    placed.shape = (len(own), *placed.shape[1:])
    placed.parts = {
        (None if e is None else e - own.start, half): _rows(w, own, part.experts) if e is None else w
        for (e, half), w in placed.parts.items()
        if e is None or e in own
    }


def _rows(stored: Any, own: range, experts: int) -> Any:
    """Returns the rows `own` of a tensor that holds all experts."""
    if isinstance(stored, TensorInfo):
        return stored.rows(own) if stored.shape[:1] == (experts,) else stored
    assert isinstance(stored, StoredWeight)
    if stored.packed.shape[0] != experts or stored.others:
        raise CheckpointError(f"fp4: {stored.packed} holds all experts in a way that cannot be read in parts")
    second = stored.global_scale
    return replace(
        stored,
        packed=_rows(stored.packed, own, experts),
        block_scale=_rows(stored.block_scale, own, experts),
        global_scale=None if second is None else _rows(second, own, experts),
    )


def columns(codes: Codes, up: bool, inner: int, part: Part, block: int, interleaved: bool) -> Codes:
    """Cuts this process's part out of a whole weight. `inner` is the intermediate size over all processes."""
    own = part.own_columns(inner)
    packed, scale = codes.packed, codes.block_scale
    if not up:
        packed = packed[..., own.start // 2 : own.stop // 2]
        return Codes(packed, scale[..., own.start // block : own.stop // block], codes.global_scale)
    groups = packed.shape[-2] // inner  # gate and up, or up alone
    sizes = (inner, groups) if interleaved else (groups, inner)

    def cut(t: Tensor) -> Tensor:
        lead, last = t.shape[:-2], t.shape[-1]
        rows = t.reshape(*lead, *sizes, last).narrow(len(lead) + sizes.index(inner), own.start, len(own))
        return rows.reshape(*lead, groups * len(own), last)

    raw = scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale
    return Codes(cut(packed), cut(raw).view(scale.dtype), codes.global_scale)
