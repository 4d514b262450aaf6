"""Describes the part of an experts module that one process holds: whole experts, or some columns of each.

transformers marks a part with DTensors. Other code that gives its meshes the same names does, too. Shard(0)
on a mesh "ep" spreads the experts. On a mesh "tp" the rows of gate and up, and the columns of down, are split
along the intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..meta.dtensors import split_over_processes
from .shares import own_experts

KINDS = ("spread", "split")


@dataclass(frozen=True)
class Part:
    kind: str
    """"spread": the process holds whole experts, `own`. "split": it holds a slice of every expert,
    `own_columns` of the intermediate size."""
    experts: int
    """Number of experts on all processes together."""
    size: int
    rank: int
    group_name: str
    tokens: str = ""
    """The value of `tokens` for `fp4::moe_ep`. "" means that the caller passes the ids of this process and
    adds up the results.
    """

    @property
    def own(self) -> range:
        """Returns the numbers of the experts that are here."""
        spread = self.kind == "spread"
        return own_experts(self.experts, self.size, self.rank) if spread else range(self.experts)

    def own_columns(self, inner: int) -> range:
        """Returns the columns of the intermediate size that are here."""
        each = inner // self.size
        return range(self.rank * each, (self.rank + 1) * each) if self.kind == "split" else range(inner)

    @property
    def numbers(self) -> list[int]:
        """Returns this part as numbers, which state dicts store."""
        return [KINDS.index(self.kind), self.experts, self.size, self.rank]

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> Part | None:
        """Returns the part that `numbers` describe, without a process group; None for an empty list."""
        if not numbers:
            return None
        kind, experts, size, rank = numbers
        return cls(KINDS[kind], experts, size, rank, group_name="")

    def __str__(self) -> str:
        if self.kind == "spread":
            return f"{len(self.own)} of {self.experts} experts, on rank {self.rank} of {self.size}"
        return f"a {self.size}th of each of {self.experts} experts, on rank {self.rank} of {self.size}"


class NoPart(Exception):
    """Raised for DTensors of another kind. The message describes them without advice."""


def part_of(module: nn.Module, up: str, down: str, biases: tuple[str, ...], transposed: bool) -> Part | None:
    """Finds the part by the DTensors among a module's parameters. None: there are none. Raises NoPart."""
    named: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    split = {name: p for name, p in named.items() if split_over_processes(p)}
    if not split:
        return None
    first = next(iter(split))
    words = f"{first} is {split_over_processes(split[first])}"
    mesh = split[first].device_mesh
    names = mesh.mesh_dim_names or ("without a name",)
    if mesh.ndim != 1 or names[0] not in ("ep", "tp") or any(p.device_mesh != mesh for p in split.values()):
        raise NoPart(words)
    if "forward" not in module.__dict__:
        raise NoPart(
            f"{words}, and nothing adds up what the processes compute (transformers' own forward does)"
        )
    experts = named[up].shape[0]
    where = mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name
    if names[0] == "ep":
        for name, p in named.items():
            if name not in split or not p.placements[0].is_shard(0):
                raise NoPart(
                    f"{name} is {split_over_processes(p) or 'whole'}; on a mesh 'ep' it must be placed S(0)"
                )
        if experts % mesh.size():
            raise NoPart(f"{words}; {experts} experts must be a multiple of the processes")
        return Part("spread", experts, *where)
    if present := [name for name in biases if named.get(name) is not None]:
        raise NoPart(f"{words}, and {present[0]} is a bias, which each process would add")
    rows, columns = (2, 1) if transposed else (1, 2)
    gated = named[up].shape[rows] == 2 * named[down].shape[columns]
    if not (_is_split(split.get(up), rows, 2 if gated else 1) and _is_split(split.get(down), columns, 1)):
        other = split.get(down)
        raise NoPart(
            f"{words}, and {down} {split_over_processes(other) or 'whole'}, not by the intermediate size"
        )
    if named[down].shape[columns] % mesh.size():
        raise NoPart(f"{words}; the intermediate size must be a multiple of the processes")
    return Part("split", experts, *where)


def _is_split(p: Any, dim: int, groups: int) -> bool:
    """True if each of `groups` equal parts of dimension `dim` is split over all processes."""
    if p is None:
        return False
    placement = p.placements[0]
    if getattr(placement, "dim", None) not in (dim, dim - p.dim()):
        return False
    factor = getattr(placement, "split_factor", 1)
    return bool(factor == groups)


def by_fsdp(module: nn.Module) -> bool:
    """True if FSDP2 shards the module's own parameters. It gathers them while the module's forward runs."""
    return hasattr(module, "_get_fsdp_state")


def local(parameter: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, or any other tensor unchanged."""
    return parameter.to_local() if split_over_processes(parameter) else parameter  # type: ignore[attr-defined]


def keep_local(module: nn.Module, part: Part | None = None) -> dict[str, Any]:
    """Replaces each DTensor parameter by this process's part of it, and returns the parameters as they were.

    With `part` (of spread experts), each whole parameter is replaced by this process's experts.
    """
    before = dict(module._parameters)
    for name, p in before.items():
        if p is None or by_fsdp(module):
            continue
        if part is not None:
            own = p.detach()[part.own.start : part.own.stop]
            own = own if p.dim() == 3 else own.clone()  # packing frees weights, so only biases are copied
        elif split_over_processes(p):
            own = local(p.detach())
        else:
            continue
        module._parameters[name] = nn.Parameter(own, requires_grad=p.requires_grad)
    return before


def keep_for_itself(module: nn.Module) -> None:
    """Turns biases into buffers, because each process has other biases.

    FSDP and DDP assume that parameters are the same on all processes.
    """
    for name, p in list(module._parameters.items()):
        if p is not None and not by_fsdp(module):
            del module._parameters[name]
            module.register_buffer(name, p.detach())


def keep_from_ddp(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Tells DistributedDataParallel which tensors of `modules` differ between processes.

    DDP around `model`, or around a part of it, would overwrite them by those of rank 0.
    """
    own = [f"{name}.{buffer}" for name, m in modules.items() for buffer, _ in m.named_buffers()]
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if inside := [name[len(start) :] for name in own if name.startswith(start)]:
            known: Any = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            module._ddp_params_and_buffers_to_ignore = [*known, *inside]  # type: ignore[assignment]
