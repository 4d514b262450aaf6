"""Rewrites attention of one token of each sequence over contiguous keys and values, such as a static cache,
to fp4::attention.

torch's attention kernel cannot begin while the kernel before it runs, and the product after it cannot load
its weights while attention runs. If there is a mask, Inductor also copies it in each layer. And torch's
kernel reads all keys, where fp4::attention reads only those that are seen: a static cache is seldom full. On
an H200 torch's kernel was faster only if all keys of a long cache are seen: 16384 of 1 or 8 sequences, 4096
of 64. It was up to 1.4 times as fast. Attention with sinks (gpt-oss) is written out as products and a
softmax, over copies of keys and values for each query head.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    item,
    operand,
    passes_order,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)
from .cache import swaps_heads

fp4 = torch.ops.fp4

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128)


def runs(device: torch.device) -> bool:
    """True for a Hopper GPU on which the kernel passed the check of its first use."""
    return native.is_hopper(device) and attention_kernel(device.index or 0)


@dataclass(frozen=True)
class _Attention:
    """Attention of queries [B, H, 1, D] over keys and values [B, Hkv, L, D]. `mask` is a boolean [B or 1, 1,
    1, L]: the keys that are seen. `node` is the result, [B, H, 1, D] or [B H, 1, D].
    """

    node: fx.Node
    query: fx.Node
    keys: fx.Node
    values: fx.Node
    mask: fx.Node | None
    scale: float
    sinks: fx.Node | None = None
    """Has a logit for each head, [H], which adds to the sum of the weights and has no value."""


def write_attention(graph: fx.Graph) -> list[str]:
    """Rewrites the layers of a step of one token. Returns a sentence that says how many."""
    done = 0
    for packet, read in ((aten.scaled_dot_product_attention, _fused), (aten.bmm, _with_sinks)):
        for node in graph.find_nodes(op="call_function", target=packet.default):
            attention = read(node)
            if attention is not None and _fits(attention):
                _write(graph, attention)
                done += 1
    what = "attention of one token begins early"
    return [f"decoding step ({done}x): {what} (fp4::attention)"] if done else []


def _fits(a: _Attention) -> bool:
    """True if the kernel has these dtypes and sizes."""
    tensors = [x for x in (a.query, a.keys, a.values, a.sinks) if x is not None]
    dtype, device = value(a.query).dtype, value(a.query).device
    sizes = [*map(static_int, shape(a.query)), *map(static_int, shape(a.keys))]
    if len(sizes) != 8 or None in sizes or not same_shape(shape(a.keys), shape(a.values)):
        return False
    if dtype not in DTYPES or any(value(x).dtype != dtype for x in tensors) or not runs(device):
        return False
    b, heads, tokens, d, same_b, kv_heads, length, same_d = (n or 0 for n in sizes)
    if (tokens, same_b, same_d) != (1, b, d) or d not in HEAD_SIZES or 0 in (b, kv_heads, length):
        return False
    return heads % kv_heads == 0


def _write(graph: fx.Graph, a: _Attention) -> None:
    with graph.inserting_before(a.node):
        q = a.query
        q = operand(q) if swaps_heads(q) else graph.call_function(aten.transpose.int, (q, 1, 2))
        sinks = () if a.sinks is None else (a.sinks,)
        out = graph.call_function(fp4.attention.default, (q, a.keys, a.values, a.mask, a.scale, *sinks))
        swapped = graph.call_function(aten.transpose.int, (out, 1, 2))
        if is_op(a.node, aten.bmm):
            swapped = graph.call_function(aten.reshape.default, (swapped, list(map(int, shape(a.node)))))
    swapped.meta.update(a.node.meta)
    a.node.replace_all_uses_with(swapped)
    graph.erase_node(a.node)


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


# --- torch's attention ---


def _fused(node: fx.Node) -> _Attention | None:
    a = arguments(node)
    query, keys, values, mask = a["query"], _cache(a["key"]), _cache(a["value"]), a["attn_mask"]
    if a["dropout_p"] != 0 or a["is_causal"] is not False or not is_tensor(query):
        return None
    if keys is None or values is None or value(query).dim() != 4:
        return None
    if mask is not None:
        mask = _mask(mask, shape(query)[0], shape(keys)[2])
        if mask is None:
            return None
    size = static_int(shape(query)[3])
    scale = size**-0.5 if a["scale"] is None and size else a["scale"]
    if not isinstance(scale, (int, float)):
        return None
    return _Attention(node, query, keys, values, mask, float(scale))


# --- attention with sinks, written out ---


def _with_sinks(node: fx.Node) -> _Attention | None:
    """Reads softmax(cat([q @ k.T * scale + mask, sinks]))[..., :-1] @ v for query heads that keys and values
    are repeated for.
    """
    if not is_tensor(node):
        return None
    weights, values = strip(operand(node)), node.args[1]
    logits = _softmax_of(weights)
    if logits is None or not is_op(logits, aten.cat) or value(logits).dim() != 4:
        return None
    a = arguments(logits)
    if a["dim"] not in (-1, 3) or len(a["tensors"]) != 2:
        return None
    scores, sinks = a["tensors"]
    sizes = [static_int(n) for n in (*shape(scores), shape(node)[-1])]
    b, heads, tokens, length, d = (n or 0 for n in sizes)
    product_sizes = b * heads, 1, length
    if tokens != 1 or not same_shape(shape(operand(node)), product_sizes):
        return None
    sinks = _sinks(sinks, heads)
    added = _added_mask(scores)
    scores, seen = (scores, None) if added is None else (added[0], _mask(added[1], b, length))
    product = _scaled(scores)
    if sinks is None or (added is not None and seen is None) or product is None:
        return None
    multiplied, scale = product
    turned = strip(operand(multiplied, 1))
    if not same_shape(shape(multiplied), product_sizes) or not _swaps_last(turned):
        return None
    query = _as(operand(multiplied), (b, heads, 1, d))
    k = _unrepeated(operand(turned), (b, heads, length, d))
    v = _unrepeated(_as(values, (b, heads, length, d)), (b, heads, length, d))
    if query is None or k is None or v is None:
        return None
    return _Attention(node, query, k, v, seen, scale, sinks)


def _swaps_last(x: fx.Node) -> bool:
    """True for a view [B, H, D, L] of [B, H, L, D]."""
    if not is_op(x, aten.transpose) or value(x).dim() != 4:
        return False
    return {integer(x, i) % 4 for i in (1, 2)} == {2, 3}


def _as(x: Any, sizes: tuple[Any, ...]) -> fx.Node | None:
    """Follows reshapes back to the first tensor of these sizes with the same elements in the same order."""
    found = None
    while True:
        if is_tensor(x) and same_shape(shape(x), sizes):
            found = x
        if not (isinstance(x, fx.Node) and passes_order(x)):
            return found
        x = operand(x)


def _softmax_of(weights: fx.Node) -> fx.Node | None:
    """Returns the logits of `softmax(logits - max(logits))`, whose last weight is left out."""
    if not is_op(weights, aten.slice) or value(weights).dim() != 4:
        return None
    a = arguments(weights)
    source = a["self"]
    length = static_int(shape(source)[-1]) or 0
    if a["dim"] not in (-1, 3) or a["start"] not in (0, None) or a["step"] != 1:
        return None
    if a["end"] not in (-1, length - 1) or not is_op(source, aten._softmax):
        return None
    a = arguments(source)
    if a["dim"] not in (-1, 3) or a["half_to_float"]:
        return None
    logits = a["self"]
    if not is_op(logits, aten.sub):
        return logits
    a = arguments(logits)
    largest = item(a["other"])
    if a.get("alpha", 1) != 1 or largest is None or largest[1] != 0 or not is_op(largest[0], aten.max):
        return None
    given = largest[0].args
    whole: fx.Node = a["self"]
    return whole if given[0] is whole and given[1:] in ((-1, True), (3, True)) else None


def _sinks(x: fx.Node, heads: Any) -> fx.Node | None:
    """Returns sinks [H], given as [B, H, 1, 1]."""
    if value(x).dim() != 4 or not same_shape(shape(x)[1:], (heads, 1, 1)):
        return None
    if is_op(x, aten.expand):
        x = operand(x)
    return _as(x, (heads,)) if same_shape(shape(x), (1, heads, 1, 1)) else None


def _added_mask(scores: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns (scores, seen) of `scores + where(seen, 0, lowest)`."""
    if not is_op(scores, aten.add) or arguments(scores).get("alpha", 1) != 1:
        return None
    a = arguments(scores)
    mask = a["other"]
    if not is_op(mask, aten.where) or value(mask).dtype != value(scores).dtype:
        return None
    seen, zero, lowest = mask.args
    least = torch.finfo(value(scores).dtype).min
    known = _constant(zero) == 0 and (_constant(lowest) or 0) <= least
    return (a["self"], seen) if known and is_tensor(a["self"]) and is_tensor(seen) else None


def _constant(x: Any) -> float | None:
    """Returns a number, or that which each element of a tensor is, rounded to the tensor's dtype."""
    if not isinstance(x, fx.Node):
        return float(x)
    x = strip(x)
    if is_op(x, aten.zeros):
        return 0.0
    names: dict[Any, str] = {aten.full: "fill_value", aten.scalar_tensor: "s"}
    name = names.get(getattr(x.target, "overloadpacket", None))
    number = None if name is None else arguments(x)[name]
    if not isinstance(number, (int, float)):
        return None
    return torch.tensor(number, dtype=value(x).dtype).item()


def _scaled(scores: fx.Node) -> tuple[fx.Node, float] | None:
    """Returns (the product, scale) of `product * scale`."""
    if not is_op(scores, aten.mul):
        return None
    product, scale = scores.args
    if not is_tensor(product) or not isinstance(scale, (int, float)):
        return None
    product = strip(product)
    return (product, float(scale)) if is_op(product, aten.bmm) else None


def _unrepeated(x: fx.Node | None, sizes: tuple[Any, ...]) -> fx.Node | None:
    """Returns contiguous keys or values [B, Hkv, L, D], of which `x` has copies for the query heads."""
    if x is None or not same_shape(shape(x), sizes):
        return None
    expanded = strip(x)
    if not is_op(expanded, aten.expand) or value(expanded).dim() != 5:
        return _cache(_as(x, sizes))
    b, heads, times, length, d = shape(expanded)
    once = (b, heads, 1, length, d)
    whole = same_shape((b, heads * times, length, d), sizes)
    if not whole or not same_shape(shape(operand(expanded)), once):
        return None
    return _cache(_as(operand(expanded), (b, heads, length, d)))
