"""What a backend is: a family of kernels, and what the rest of the package asks about it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

from .. import native
from ..fitted import Group, families, groups
from ..meta.layouts import LAYOUTS

UNQUANTISED = (torch.float32, torch.bfloat16, torch.float16)


def _always(device_index: int) -> bool:
    return True


def _never(format: str) -> bool:
    return False


@dataclass(frozen=True)
class Backend:
    """One family of kernels. fp4_ops/backends/__init__.py lists them all.

    A device is asked about by its index.
    """

    name: str
    """As reports and `info` print it."""
    device_type: str
    layouts: tuple[str, ...]
    """Of weights, that its kernels read; the fastest first."""
    needs: str
    """What reads these layouts, in the words of an error: "the ... kernels"."""
    available: Callable[[int], bool] = _always
    """Whether its kernels are built and a device runs them."""
    trusted: Callable[[int], bool] = _always
    """Whether an available one is taken for weights, which may cost a check of its first use."""
    multiplies_fp4: Callable[[str], bool] = _never
    """Whether the current GPU's tensor cores multiply rows and weights of a format as they are."""
    rows: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """Of a layout with which they read fewer dtypes of unquantised rows than it allows, those dtypes."""
    a_formats: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Of a layout with which `fp4::moe` takes fewer of those that it allows, the ones it takes."""
    operators: str = ""
    """The module of operators in Python, loaded when one is called. They serve where there is none in C++."""

    def operator(self, name: str) -> Callable[..., object] | None:
        """The operator of this name in Python, or None."""
        return getattr(self.module(), name, None) if self.operators else None

    def reads(self, layout: str) -> tuple[torch.dtype, ...]:
        """The activations that its kernels read with a layout; empty: all."""
        allowed = LAYOUTS[layout].a_dtypes
        if layout not in self.rows:
            return allowed
        return tuple(dtype for dtype in allowed if dtype not in UNQUANTISED or dtype in self.rows[layout])

    def takes(self, a_format: str, layout: str) -> bool:
        """Whether its `fp4::moe` takes an `a_format` with a layout, of those that name theirs."""
        return a_format in self.a_formats.get(layout, LAYOUTS[layout].a_formats)

    @property
    def constants(self) -> dict[str, Group]:
        """The numbers that were fitted to times of these kernels."""
        return groups(self.name)

    def module(self) -> ModuleType:
        return importlib.import_module(self.operators, __package__)


def native_backend(name: str, trusted: Callable[[int], bool] = _always) -> Backend:
    """The native kernels that `kernels.json` in the folder of this name describes (fitted.py)."""
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
