"""What a backend is: a family of kernels, and what the rest of the package asks about it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from .. import native
from ..fitted import Group, families, groups


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
    operators: str = ""
    """The module of operators in Python, loaded when one is called. They serve where there is none in C++."""

    def operator(self, name: str) -> Callable[..., object] | None:
        """The operator of this name in Python, or None."""
        return getattr(self.module(), name, None) if self.operators else None

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
        operators=".launchers.operators",
    )
