"""Imports modules of fp4_ops.dev, if its C++ part was built."""

from __future__ import annotations

from types import ModuleType

import pytest


def development(name: str) -> ModuleType:
    """Return fp4_ops.dev.`name`. If it was not built, skip the test or file that asks for it."""
    __tracebackhide__ = True
    return pytest.importorskip(
        f"fp4_ops.dev.{name}", reason="needs fp4_ops.dev, which `make dev` builds", exc_type=ImportError
    )
