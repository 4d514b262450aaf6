"""Defines the report of `fp4_ops.prepare`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..experts.find import OTHERWISE
from .memory_plan import MemoryPlan

OWN_CODE = "its own"
"""Value of `gate` for experts that are modules of their own and keep running their own code."""


@dataclass(frozen=True)
class PreparedModule:
    """An experts module. It was prepared if `reason` is empty; else `reason` says why it was left alone."""

    name: str
    reason: str = ""
    gate: str = ""
    shape: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    """Size of the packed weights. 0 if an earlier module shares them."""

    @property
    def calls_moe(self) -> bool:
        """True if the module is prepared and calls `fp4::moe` instead of its own code."""
        return not self.reason and self.gate != OWN_CODE

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: left alone: {self.reason}"
        sizes = f"{_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"
        return f"{self.name}: {self.shape}, gate {self.gate}, {sizes}"


@dataclass(frozen=True)
class OutsideWeights:
    """The linear layers of one kind outside the experts that were prepared."""

    kind: str
    format: str
    layers: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        sizes = f"{_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"
        return f"{self.kind}: {self.layers} linear layers, {self.format}, {sizes}"


@dataclass
class PrepareReport:
    """Result of `prepare` for each experts module of a model."""

    format: str
    layout: str
    activations: str
    modules: list[PreparedModule] = field(default_factory=list)
    outside: list[OutsideWeights] = field(default_factory=list)
    exchange: str = ""
    """How tokens reach experts that are spread over processes."""
    division: str = ""
    """How experts are divided over processes, spread or split, with an estimate for the other way."""
    memory: MemoryPlan | None = None
    """A plan that says where the weights are stored, if `gpu_memory` was given."""

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
        lines = [
            head + f"activations {self.activations}",
            *(f"  {m}" for m in [*self.modules, *self.outside]),
        ]
        if self.exchange:
            lines.append(f"  between processes: {self.exchange}")
        if self.division:
            lines.append(f"  between processes: {self.division}")
        if self.memory is not None:
            lines += [f"  {line}" for line in str(self.memory).splitlines()]
        if left:
            lines.append(f"  {OTHERWISE}")
        return "\n".join([*lines, f"expert weights {_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"])


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"
