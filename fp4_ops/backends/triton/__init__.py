"""Backend of Triton's kernels, for any GPU that Triton supports. They compile on the user's machine."""

from __future__ import annotations

import importlib.util
from functools import cache

from ..base import Backend


@cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _multiplies_fp4(format: str) -> bool:
    import torch

    from ...meta.formats import FORMATS, FP4_FORMATS
    from .scaled import native, support
    from .tiles import device_of

    takes = support.takes(FORMATS[format], format, device_of(torch.device("cuda")))
    return takes or (format in FP4_FORMATS and native.runs(format, torch.cuda.current_device()))


TRITON = Backend(
    "triton",
    "cuda",
    layouts=("plain",),
    needs="Triton's kernels",
    available=lambda index: installed(),
    multiplies_fp4=_multiplies_fp4,
    operators=".triton.operators",
)
