"""Public place of the decoding loop, whose code is in fp4_ops/integrations/transformers/generation.py."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Look a name up on first use, as the module is for transformers only."""
    return getattr(importlib.import_module("fp4_ops.integrations.transformers.generation"), name)
