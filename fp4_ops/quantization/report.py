"""Reports the quantisation error of each expert's weights: a table, JSON, and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..experts.find import check_model
from ..meta.formats import FORMATS
from .calibration import Calibration
from .experts import MATRICES, stacked_experts
from .grid import decode, element, split_blocks
from .methods import METHODS
from .weight import matrices_at_once, quantize_weight


@dataclass(frozen=True)
class ExpertError:
    """One weight matrix of one expert."""

    module: str
    matrix: str
    expert: int
    sqnr: float
    """10 log10(sum w^2 / sum (w - quantised)^2), in dB. Infinite if quantisation is exact."""
    saturated: float
    """Share of blocks with a value too large for their scale: see `grid.Element.saturated`."""


@dataclass
class ErrorReport:
    """One entry for each matrix of each expert, in the order of the model."""

    format: str
    method: str
    errors: list[ExpertError] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Modules that `prepare` leaves as they are, and why; `python -m fp4_ops quantize` quantises them."""

    def worst(self, count: int = 10) -> list[ExpertError]:
        """Returns the matrices with the lowest SQNR."""
        return sorted(self.errors, key=lambda e: e.sqnr)[:count]

    def _groups(self) -> dict[tuple[str, str], list[ExpertError]]:
        groups: dict[tuple[str, str], list[ExpertError]] = {}
        for e in self.errors:
            groups.setdefault((e.module, e.matrix), []).append(e)
        return groups

    def __str__(self) -> str:
        width = max((len(e.module) for e in self.errors), default=6)
        head = f"{'module':{width}} {'matrix':8} {'experts':>7} {'SQNR dB: min':>12} {'median':>7} saturated"
        lines = [f"weight errors, {self.format}, method {self.method}", head, "-" * len(head)]
        for (module, matrix), errors in self._groups().items():
            sqnr = sorted(e.sqnr for e in errors)
            saturated = sum(e.saturated for e in errors) / len(errors)
            lines.append(
                f"{module:{width}} {matrix:8} {len(errors):7} {sqnr[0]:12.2f} {sqnr[len(sqnr) // 2]:7.2f} "
                f"{100 * saturated:8.2f}%"
            )
        lines.append("worst experts:")
        for e in self.worst():
            where = f"{e.module:{width}} {e.matrix:8}"
            lines.append(f"{where} {e.expert:7} {e.sqnr:12.2f} {'':7} {100 * e.saturated:8.2f}%")
        for why in dict.fromkeys(self.left.values()):
            names = ", ".join(name for name, reason in self.left.items() if reason == why)
            lines.append(f"prepare leaves {names} alone: {why}; `python -m fp4_ops quantize` packs them")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the report as JSON. Infinite SQNR becomes null."""
        report = asdict(self)
        for e in report["errors"]:
            e["sqnr"] = e["sqnr"] if math.isfinite(e["sqnr"]) else None
        return json.dumps(report, indent=1)

    def save_picture(self, path: str | Path) -> None:
        """Draws a heat map of the SQNR of each matrix, experts x layers. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("fp4: the picture needs matplotlib: pip install matplotlib") from None
        groups = self._groups()
        present = [m for m in MATRICES if any(matrix == m for _, matrix in groups)]
        figure = Figure(figsize=(1 + 5 * len(present), 5), layout="constrained")
        finite = [e.sqnr for e in self.errors if math.isfinite(e.sqnr)]
        for axes, matrix in zip(figure.subplots(1, len(present), squeeze=False)[0], present):
            layers = [errors for (_, m), errors in groups.items() if m == matrix]
            experts = max(len(errors) for errors in layers)
            values = torch.full((experts, len(layers)), math.nan)
            for layer, errors in enumerate(layers):
                values[: len(errors), layer] = torch.tensor([e.sqnr for e in errors])
            image = axes.imshow(
                values.numpy(), aspect="auto", origin="lower", vmin=min(finite), vmax=max(finite)
            )
            axes.set(title=matrix, xlabel="layer", ylabel="expert")
        figure.colorbar(image, ax=figure.axes, label="SQNR (dB)")
        figure.suptitle(f"Weight error of each expert: {self.format}, {self.method}")
        figure.savefig(path, dpi=120)


def weight_errors(
    w: Tensor, packed: Tensor, block_scale: Tensor, global_scale: Tensor | None, format: str
) -> tuple[Tensor, Tensor]:
    """Returns (SQNR in dB [E], share of saturated blocks [E]), given w [E, N, K] and its 4-bit form in layout
    plain."""
    fmt = FORMATS[format]
    sqnr, saturated = [], []
    for part in _parts(w):
        original = split_blocks(w[part].float(), fmt.block)
        step = block_scale[part].float()[..., None]
        if global_scale is not None and global_scale.numel():
            step = step * global_scale[part, None, None, None]
        error = split_blocks(decode(packed[part], fmt), fmt.block) * step - original
        # Compute in units of the largest weight. Otherwise the squares of small weights would underflow.
        unit = original.abs().flatten(1).amax(-1)
        unit = torch.where(unit == 0, 1.0, unit)[:, None]
        signal, noise = ((x.flatten(1) / unit).double().square().sum(-1) for x in (original, error))
        sqnr.append(torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise)))
        saturated.append(
            (original.abs().amax(-1) > element(fmt).saturated * step[..., 0]).float().mean((-2, -1))
        )
    return torch.cat(sqnr).float(), torch.cat(saturated)


def _parts(w: Tensor) -> Iterator[slice]:
    at_once = matrices_at_once(w.device.type, *w.shape[1:])
    return (slice(start, start + at_once) for start in range(0, len(w), at_once))


@torch.no_grad()
def error_report(
    model: nn.Module, format: str = "nvfp4", method: str = "rtn", calibration: Calibration | None = None
) -> ErrorReport:
    """Measures the weight errors of `prepare` with these arguments. The model does not change.

    For stacks of experts that `prepare` leaves alone it measures the errors of `python -m fp4_ops quantize`.
    Methods that use calibration minimise the error of outputs and so lose SQNR here. Compare those by
    `evaluate`.
    """
    check_model(model)
    modules, left = stacked_experts(model)
    report = ErrorReport(format, method, left=left)
    for m in modules:
        for matrix in MATRICES:
            w = m.weight(matrix)
            needs = method in METHODS and METHODS[method].calibration != "none"
            moments = calibration.get(m.name, matrix) if needs and calibration else None
            try:
                q = quantize_weight(w, format, method, calibration=moments)
            except ValueError as error:
                raise ValueError(f"{error} (w is {matrix} of {m.name})") from None
            sqnr, saturated = weight_errors(w, *q, format)
            report.errors += [
                ExpertError(m.name, matrix, expert, *pair)
                for expert, pair in enumerate(zip(sqnr.tolist(), saturated.tolist()))
            ]
    return report
