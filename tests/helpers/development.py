"""The modules of fp4_ops.dev, where its part in C++ was built."""

from __future__ import annotations

from types import ModuleType

import pytest


def development(name: str) -> ModuleType:
    """fp4_ops.dev.`name`; without it the test, or the file that asks for it, is skipped by its name."""
    __tracebackhide__ = True
    return pytest.importorskip(
        f"fp4_ops.dev.{name}", reason="needs fp4_ops.dev, which `make dev` builds", exc_type=ImportError
    )
