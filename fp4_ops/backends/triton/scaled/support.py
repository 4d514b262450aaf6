"""Decides where the FP4 x FP4 kernels run: by GPU, by Triton's version, and by a check of the first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
import triton

from ....meta.formats import Format
from ....runtime import first_use
from ....runtime.libraries import version_of
from .. import launch
from ..tiles import Device, Tile

FIRST_TRITON = {(10, 0): (3, 6), (10, 3): (3, 6), (12, 0): (3, 6), (12, 1): (3, 8)}
"""Compute capability -> the first Triton, of those that fp4_ops takes, that has its FP4 instructions.

Other versions convert the operands of `tl.dot_scaled` to bfloat16, or fail. For example, 3.7 does so for
sm_121.
"""

BOUND = 1e-3
"""Bound of the error at the first use. A wrong scale or code is far above it, as products are exact."""

FirstError = Callable[[str, Tile, Device, torch.device], float]
"""Returns the error of the first product of a format with a tile, on a device."""

INSTEAD = "The path for all GPUs, with rows as bfloat16,"

logger = logging.getLogger("fp4_ops")

_wrong: set[tuple[Device, str]] = set()
_told: set[tuple[Device, str]] = set()


def has_instructions(device: Device, triton_version: tuple[int, ...] | None = None) -> bool:
    """True if this version of Triton (None: the installed one) emits FP4 instructions for the device."""
    first = FIRST_TRITON.get(device.capability)
    return first is not None and (triton_version or _triton()) >= first


@cache
def _triton() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def takes(fmt: Format, a_format: str, device: Device) -> bool:
    """True if these kernels multiply rows of `a_format` by weights of `fmt` on the device.

    Formats must be the same: an instruction reads the scales of both in one way. For fp8 rows it would read
    nvfp4's scales as powers of two.
    """
    same = fmt.element == "e2m1" and a_format == fmt.name
    return same and has_instructions(device) and (device, fmt.name) not in _wrong


def trusted(format: str, tile: Tile, device: Device, first_error: FirstError) -> bool:
    """True if the tile's first product on the device agreed with the dequantised one.

    The result may come from the user's cache. After one failure no tile of the format is used.
    """
    if launch.INTERPRET:
        return True
    if (device, format) in _wrong:
        return False
    place = torch.device("cuda", torch.cuda.current_device())
    try:
        right = first_use.agrees(
            f"the product of {format} rows and weights, tile {tile}",
            f"{device.name}, compute capability {device.capability[0]}.{device.capability[1]}",
            f"fp4_ops {version_of('fp4_ops')}, Triton {triton.__version__}",
            lambda: first_error(format, tile, device, place),
            BOUND,
            INSTEAD,
        )
    except (launch.TryNext, torch.OutOfMemoryError):  # the device refuses the tile, or is full for now
        return False
    if not right and not first_use.capturing():
        _wrong.add((device, format))
    return right


def no_tile(error: launch.NoTile, format: str, device: Device) -> None:
    """Warns once that the path for all GPUs is taken, and why."""
    if (device, format) in _wrong | _told or first_use.capturing():
        return
    _told.add((device, format))
    logger.warning("fp4: %s. %s is used instead", str(error).split(". Please")[0], INSTEAD.rstrip(","))
