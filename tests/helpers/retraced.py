"""Traces a graph again like Inductor, without generating code, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager_decomp_partition


def retraced(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], config_patches: Any = None
) -> Callable[..., Any]:
    """Trace with AOTAutograd and Inductor's decompositions. The operators of the result run without
    changes."""
    return aot_eager_decomp_partition(gm, inputs)
