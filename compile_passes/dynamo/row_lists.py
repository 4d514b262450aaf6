"""`token.tolist()` that only indexes tensors: `x[None, token_list]`, as old remote code of Mixtral has it.

A list of as many numbers as only the data knows cannot be captured. Where it is nothing but an index, the
tensor that it was says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.traced_nodes import example
from .bytecode import only_indexes


def as_index(method: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
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
