"""Public place of FP4Config, whose code is in fp4_ops/integrations/transformers/quantizer.py."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Look a name up on first use, as the module imports transformers."""
    return getattr(importlib.import_module("fp4_ops.integrations.transformers.quantizer"), name)
