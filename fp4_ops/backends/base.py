"""Defines `Backend`: a family of kernels, with the properties that the rest of the package needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

from ..meta.layouts import LAYOUTS
from ..runtime import native
from ..runtime.fitted import Group, families, groups

UNQUANTISED = (torch.float32, torch.bfloat16, torch.float16)


def _always(device_index: int) -> bool:
    return True


def _never(format: str) -> bool:
    return False


@dataclass(frozen=True)
class Backend:
    """A family of kernels. fp4_ops/backends/__init__.py lists all backends.

    The int that a function takes is the index of a device.
    """

    name: str
    """Name in reports and `info`."""
    device_type: str
    layouts: tuple[str, ...]
    """Layouts of weights that the kernels read, the fastest first."""
    needs: str
    """Name of the kernels in an error message: "the ... kernels"."""
    available: Callable[[int], bool] = _always
    """True if the kernels are built and the device runs them."""
    trusted: Callable[[int], bool] = _always
    """True if the kernels may be used for weights. The first call may run a check of the kernels."""
    multiplies_fp4: Callable[[str], bool] = _never
    """True if the current GPU's tensor cores multiply rows and weights of this format directly."""
    rows: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """Dtypes of unquantised rows, by layout. Only for layouts that allow more than the kernels read."""
    a_formats: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Values of `a_format` that `fp4::moe` takes, by layout. Only for layouts that allow more."""
    operators: str = ""
    """Module with operators in Python. It is loaded at the first call of an operator that C++ does not
    have.
    """

    def operator(self, name: str) -> Callable[..., object] | None:
        """Returns the operator of this name in Python, or None."""
        return getattr(self.module(), name, None) if self.operators else None

    def reads(self, layout: str) -> tuple[torch.dtype, ...]:
        """Returns the dtypes of activations that the kernels read with a layout. Empty means all dtypes."""
        allowed = LAYOUTS[layout].a_dtypes
        if layout not in self.rows:
            return allowed
        return tuple(dtype for dtype in allowed if dtype not in UNQUANTISED or dtype in self.rows[layout])

    def takes(self, a_format: str, layout: str) -> bool:
        """True if `fp4::moe` takes this `a_format` with a layout that lists its formats."""
        return a_format in self.a_formats.get(layout, LAYOUTS[layout].a_formats)

    @property
    def constants(self) -> dict[str, Group]:
        """Returns the constants that were fitted to times of these kernels."""
        return groups(self.name)

    def module(self) -> ModuleType:
        return importlib.import_module(self.operators, __package__)


def native_backend(name: str, trusted: Callable[[int], bool] = _always) -> Backend:
    """Makes the backend that `kernels.json` in the folder `name` describes (fitted.py)."""
    family = next(f for f in families() if f.name == name)
    return Backend(
        name,
        "cuda",
        layouts=family.layouts,
        needs=f"the native CUDA (compute capability {family.capability_words}, FP4_CUDA_ARCHS=all) kernels",
        available=lambda index: native.family(index) == family.family,
        trusted=trusted,
        rows={layout: tuple(getattr(torch, name) for name in names) for layout, names in family.rows.items()},
        a_formats=family.a_formats,
        operators=".launchers.operators",
    )
