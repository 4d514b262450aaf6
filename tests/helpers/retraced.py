"""Runs a graph as Inductor would trace it again, without generating code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager_decomp_partition


def retraced(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], config_patches: Any = None
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's decompositions; the operators of the result run as they are."""
    return aot_eager_decomp_partition(gm, inputs)
