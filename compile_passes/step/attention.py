"""Rewrites attention of one token of each sequence over contiguous keys and values, such as a static cache,
to fp4::attention.

torch's attention kernel cannot begin while the kernel before it runs, and the product after it cannot load
its weights while attention runs. If there is a mask, Inductor also copies it in each layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...backends.hopper.trust import attention_kernel
from ...runtime import native
from ..graph.nodes import (
    arguments,
    aten,
    integer,
    is_op,
    is_tensor,
    operand,
    same_shape,
    shape,
    static_int,
    value,
)
from .cache import swaps_heads

fp4 = torch.ops.fp4

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128)
MAX_BYTES = 2**20
"""Most bytes of the keys of a layer's cache. On an H200, six layers take 420 us with this operator and 442 us
with torch's kernel for 1 sequence of 100 keys (0.1 MB), but 948 and 873 us for 64 sequences (7 MB).
"""


def runs(device: torch.device) -> bool:
    """True for a Hopper GPU on which the kernel passed the check of its first use."""
    return native.is_hopper(device) and attention_kernel(device.index or 0)


def write_attention(graph: fx.Graph) -> list[str]:
    """Rewrites the layers of a step of one token. Returns a sentence that says how many."""
    nodes = graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    done = sum(_write(graph, node) for node in nodes)
    what = "attention of one token begins early"
    return [f"decoding step ({done}x): {what} (fp4::attention)"] if done else []


def _write(graph: fx.Graph, node: fx.Node) -> bool:
    a = arguments(node)
    query, keys, values = a["query"], _cache(a["key"]), _cache(a["value"])
    if a["dropout_p"] != 0 or a["is_causal"] is not False or not is_tensor(query):
        return False
    if keys is None or values is None or not same_shape(shape(keys), shape(values)):
        return False
    if value(query).dim() != 4 or any(value(x).dtype != value(query).dtype for x in (keys, values)):
        return False
    sizes = [*map(static_int, shape(query)), *map(static_int, shape(keys))]
    if None in sizes or value(query).dtype not in DTYPES or not runs(value(query).device):
        return False
    b, heads, tokens, d, same_b, kv_heads, length, same_d = (n or 0 for n in sizes)
    if (tokens, same_b, same_d) != (1, b, d) or d not in HEAD_SIZES or 0 in (b, kv_heads, length):
        return False
    if heads % kv_heads or value(keys).nbytes > MAX_BYTES:
        return False
    mask = a["attn_mask"]
    if mask is not None:
        mask = _mask(mask, b, length)
        if mask is None:
            return False
    scale = d**-0.5 if a["scale"] is None else a["scale"]
    if isinstance(scale, fx.Node):
        return False
    with graph.inserting_before(node):
        q = operand(query) if swaps_heads(query) else graph.call_function(aten.transpose.int, (query, 1, 2))
        out = graph.call_function(fp4.attention.default, (q, keys, values, mask, float(scale)))
        swapped = graph.call_function(aten.transpose.int, (out, 1, 2))
    swapped.meta.update(node.meta)
    node.replace_all_uses_with(swapped)
    graph.erase_node(node)
    return True


def _cache(x: Any) -> fx.Node | None:
    """Returns keys or values [B, H, L, D] that lie in memory in this order."""
    if (
        is_op(x, aten.squeeze)
        and is_op(operand(x), aten.unsqueeze)
        and x.args[1:] == operand(x).args[1:]
        and integer(x, 1) >= 0
    ):
        x = operand(operand(x))
    return x if is_tensor(x) and value(x).dim() == 4 and value(x).is_contiguous() else None


def _mask(x: Any, b: int, length: int) -> fx.Node | None:
    """Returns which keys [B or 1, 1, 1, L] the heads of a sequence see."""
    if is_op(x, aten.expand) and value(operand(x)).dim() == 4:
        x = operand(x)
    if not is_tensor(x) or value(x).dtype != torch.bool:
        return None
    return x if any(same_shape(shape(x), (n, 1, 1, length)) for n in (1, b)) else None
