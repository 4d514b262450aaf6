"""Says what `quantize` has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ConvertReport:
    """Result of `quantize_checkpoint`."""

    out: Path
    format: str
    dialect: str
    matrices: int
    files: int
    resumed: int
    """Files that an earlier run had finished."""
    bytes_before: int
    bytes_after: int
    unseen: int = 0
    """Experts that no token of the calibration text reached."""
    outside: int = 0
    """Expert matrices that have no place in the model, so that no text can calibrate them."""
    linears: Mapping[str, int] = field(default_factory=dict)
    """The number of linear layers outside the experts that are in 4 bits, too, by format."""

    def __str__(self) -> str:
        resumed = f" ({self.resumed} from an earlier run)" if self.resumed else ""
        counts = {self.format: [f"{self.matrices} expert matrices"]}
        for format, count in self.linears.items():
            counts.setdefault(format, []).append(f"{count} linear layers")
        what = ", ".join(f"{' and '.join(kinds)} in {format}" for format, kinds in counts.items())
        lines = [
            f"{self.out}: {what}, stored as {self.dialect}, {self.files} files{resumed}, "
            f"{_size(self.bytes_before)} -> {_size(self.bytes_after)}"
        ]
        if self.unseen:
            lines.append(f"{self.unseen} experts saw no token of the calibration text: quantised without it")
        if self.outside:
            lines.append(f"{self.outside} matrices are no part of the model that runs: quantised without it")
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
