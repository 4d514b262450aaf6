"""What `fp4_ops.prepare` says it did."""

from __future__ import annotations

from dataclasses import dataclass, field

from .find_experts import OTHERWISE

OWN_CODE = "its own"
"""Gate of experts that are modules: they run by their own code."""


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

    @property
    def calls_moe(self) -> bool:
        """Whether it is prepared, and calls `fp4::moe` instead of its own code."""
        return not self.reason and self.gate != OWN_CODE

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
    exchange: str = ""
    """How tokens reach experts that are spread over processes."""
    division: str = ""
    """Whether experts are spread or split, and what the other way would cost."""

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
        lines = [head + f"activations {self.activations}", *(f"  {m}" for m in self.modules)]
        if self.exchange:
            lines.append(f"  between processes: {self.exchange}")
        if self.division:
            lines.append(f"  between processes: {self.division}")
        if left:
            lines.append(f"  {OTHERWISE}")
        return "\n".join([*lines, f"expert weights {_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"])


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"
