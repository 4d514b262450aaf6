"""Lists the quantisation methods in a table. A new method is a new row."""

from __future__ import annotations

from dataclasses import dataclass

from ..meta.formats import FORMATS
from .grid import E4M3_MAX


@dataclass(frozen=True)
class Method:
    """Rule that chooses a weight's block scales and codes.

    Round-to-nearest scales the largest magnitude of a block to the element's `top` (`grid.Element`). The
    fields add other candidates. Of several candidates, the one with the least squared error wins.
    """

    name: str
    summary: str
    targets: tuple[float, ...] = ()
    """Further magnitudes, in addition to `top`, to which the largest value of a block may be scaled."""
    search: bool = False
    """True if the scales within the element's `reach` are candidates, too."""
    mantissas: tuple[int, ...] = tuple(range(8))
    """The e4m3 mantissas a block scale may have."""
    calibration: str = "none"
    """"none"; "diagonal": E[x_k^2] weights each column's error; "full": E[x x^T], for `compensate`."""
    compensate: bool = False
    """True for GPTQ: columns are rounded in order, and later columns compensate each rounding error."""
    formats: tuple[str, ...] = tuple(FORMATS)

    @property
    def chooses(self) -> bool:
        """True if a block has more than one candidate scale."""
        return self.search or bool(self.targets)

    @property
    def largest_scale(self) -> float:
        """Returns the e4m3 scale that round-to-nearest gives the largest block of a matrix.

        Without other candidates, all of e4m3's range is used. With them, scales may become 1.75 times larger.
        """
        return 256.0 if self.chooses else E4M3_MAX


METHODS = {
    m.name: m
    for m in (
        Method(
            "rtn",
            "round to nearest, the block's largest value at 6 (int4: 7.5): what fp4::quantize does",
        ),
        Method(
            "four_over_six",
            "the block's largest value at 6 or at 4, whichever has the smaller error",
            targets=(4.0,),
            formats=("nvfp4",),
        ),
        Method("search", "the block scale of least squared error among those near that of rtn", search=True),
        Method(
            "fp8_exact",
            "search among scales that FP8 tensor cores take without rounding (e4m3 mantissas 0, 2, 4)",
            search=True,
            mantissas=(0, 2, 4),
            formats=("nvfp4",),
        ),
        Method(
            "weighted",
            "search, errors weighted by the calibration text's mean square of each input",
            search=True,
            calibration="diagonal",
        ),
        Method(
            "gptq",
            "GPTQ on the calibration text, with the block scale searched inside the recursion",
            search=True,
            calibration="full",
            compensate=True,
        ),
        Method(
            "gptq_fp8_exact",
            "gptq among the scales of fp8_exact",
            search=True,
            mantissas=(0, 2, 4),
            calibration="full",
            compensate=True,
            formats=("nvfp4",),
        ),
    )
}


def find_method(name: str, format: str) -> Method:
    """Returns the method of that name. Raises ValueError if there is none, no such format, or if it does not
    apply to the format."""
    if name not in METHODS:
        raise ValueError(f"fp4: method is {name!r}; it must be one of: {', '.join(METHODS)}")
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    method = METHODS[name]
    if format not in method.formats:
        raise ValueError(f"fp4: method {name!r} is for {', '.join(method.formats)}; format is {format!r}")
    return method


def without_calibration(method: Method) -> Method:
    """Returns the method that chooses among the same block scales and needs no calibration text."""
    if method.calibration == "none":
        return method
    alike = (m for m in METHODS.values() if m.search and m.mantissas == method.mantissas)
    return next(m for m in alike if m.calibration == "none")
