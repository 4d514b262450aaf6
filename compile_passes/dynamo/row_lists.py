"""Lets Dynamo capture `token.tolist()` that only indexes tensors: `x[None, token_list]`, as in Mixtral's old
remote code.

A list with a data-dependent number of entries cannot be captured. If it is only used as an index, the
original tensor gives the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.traced_nodes import example
from .bytecode import only_indexes

if TYPE_CHECKING:
    from .api import Method, Tracer, Variable


def as_index(method: Method) -> Method:
    def tolist(self: Variable, tx: Tracer, *args: object, **kwargs: object) -> Variable:
        rows = example(self.as_proxy().node)
        if (
            isinstance(rows, torch.Tensor)
            and rows.dim() == 1
            and rows.dtype in (torch.int32, torch.int64)
            and free_unbacked_symbols(rows.shape[0])
            and only_indexes(tx)
        ):
            return self.call_method(tx, "clone", [], {})
        return method(self, tx, *args, **kwargs)

    return tolist
