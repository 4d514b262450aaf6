"""Rewrites attention of one token of each sequence over contiguous keys and values, such as a static cache,
to fp4::attention.

On a GPU, torch's attention kernel cannot begin while the kernel before it runs, and the product after it
cannot load its weights while attention runs. If there is a mask, Inductor also copies it in each layer. And
torch's kernel reads all keys, where fp4::attention reads only those that are seen: a static cache is seldom
full. On an H200 torch's kernel was faster only if all keys of a long cache are seen: 16384 of 1 or 8
sequences, 4096 of 64. It was up to 1.4 times as fast. Attention with sinks (gpt-oss) is written out as
products and a softmax, over copies of keys and values for each query head.
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
    is_float_cast,
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

DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.bfloat16,)}
HEAD_SIZES = (64, 128)


def runs(device: torch.device) -> bool:
    """True for a CPU, and for a Hopper GPU on which the kernel passed the check of its first use."""
    return device.type == "cpu" or (native.is_hopper(device) and attention_kernel(device.index or 0))


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
    hides: bool = False
    """True if the mask is of the keys that are not seen."""
    sinks: fx.Node | None = None
    """Has a logit for each head, [H], which adds to the sum of the weights and has no value."""


def write_attention(graph: fx.Graph) -> list[str]:
    """Rewrites the layers of a step of one token. Returns a sentence that says how many."""
    done = 0
    inverted: dict[fx.Node, fx.Node] = {}
    for packet, read in ((aten.scaled_dot_product_attention, _fused), (aten.bmm, _written_out)):
        for node in graph.find_nodes(op="call_function", target=packet.default):
            attention = read(node)
            if attention is not None and _fits(attention):
                _write(graph, attention, inverted)
                done += 1
    what = "attention of one token over a cache is one kernel"
    return [f"decoding step ({done}x): {what} (fp4::attention)"] if done else []


def _fits(a: _Attention) -> bool:
    """True if the kernel has these dtypes and sizes."""
    tensors = [x for x in (a.query, a.keys, a.values, a.sinks) if x is not None]
    dtype, device = value(a.query).dtype, value(a.query).device
    sizes = [*map(static_int, shape(a.query)), *map(static_int, shape(a.keys))]
    if len(sizes) != 8 or None in sizes or not same_shape(shape(a.keys), shape(a.values)):
        return False
    if (
        dtype not in DTYPES.get(device.type, ())
        or any(value(x).dtype != dtype for x in tensors)
        or not runs(device)
    ):
        return False
    b, heads, tokens, d, same_b, kv_heads, length, same_d = (n or 0 for n in sizes)
    if (tokens, same_b, same_d) != (1, b, d) or d not in HEAD_SIZES or 0 in (b, kv_heads, length):
        return False
    return heads % kv_heads == 0


def _write(graph: fx.Graph, a: _Attention, inverted: dict[fx.Node, fx.Node]) -> None:
    with graph.inserting_before(a.node):
        q = a.query
        q = operand(q) if swaps_heads(q) else graph.call_function(aten.transpose.int, (q, 1, 2))
        sinks = () if a.sinks is None else (a.sinks,)
        mask = a.mask
        if mask is not None and a.hides:
            # One node for all layers, so that they share what it computes (shared.py).
            if mask not in inverted:
                inverted[mask] = graph.call_function(aten.logical_not.default, (mask,))
                inverted[mask].meta["val"] = torch.logical_not(value(mask))
            mask = inverted[mask]
        out = graph.call_function(fp4.attention.default, (q, a.keys, a.values, mask, a.scale, *sinks))
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


# --- attention as products and a softmax ---


def _written_out(node: fx.Node) -> _Attention | None:
    """Reads softmax(q @ k.T * scale + mask) @ v, or softmax(cat([q @ k.T * scale + mask, sinks]))[..., :-1]
    @ v, for query heads that keys and values are repeated for.

    Without sinks a mask must hide by -inf: if no key is seen, a finite number would give the values' mean,
    and -inf gives NaN, which is no result to keep.
    """
    if not is_tensor(node):
        return None
    weights, values = strip(operand(node)), node.args[1]
    found = _with_sinks(weights) or _plain(weights)
    if found is None or value(found[0]).dim() != 4:
        return None
    scores, sinks = found
    sizes = [static_int(n) for n in (*shape(scores), shape(node)[-1])]
    b, heads, tokens, length, d = (n or 0 for n in sizes)
    product_sizes = b * heads, 1, length
    if tokens != 1 or not same_shape(shape(operand(node)), product_sizes):
        return None
    if sinks is not None:
        sinks = _sinks(sinks, heads)
        if sinks is None:
            return None
    masked, mask = _masked(scores), None
    if masked is not None:
        scores, mask = masked.scores, _mask(masked.mask, b, length)
        if mask is None or (found[1] is None and masked.lowest != -torch.inf):
            return None
    product = _scaled(scores)
    if product is None:
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
    hides = masked is not None and masked.hides
    return _Attention(node, query, k, v, mask, scale, hides, sinks)


def _with_sinks(weights: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the scores and the sinks that were put beside them."""
    logits = _softmax_of(weights)
    if logits is None or not is_op(logits, aten.cat) or value(logits).dim() != 4:
        return None
    a = arguments(logits)
    if a["dim"] not in (-1, 3) or len(a["tensors"]) != 2:
        return None
    scores, sinks = a["tensors"]
    return scores, sinks


def _plain(weights: fx.Node) -> tuple[fx.Node, None] | None:
    """Returns the scores of a softmax without sinks, which may be computed in float32."""
    if is_float_cast(weights):
        weights = strip(operand(weights))
    if not is_op(weights, aten._softmax) or value(weights).dim() != 4:
        return None
    a = arguments(weights)
    scores = strip(a["self"])
    if is_float_cast(scores):
        scores = strip(operand(scores))
    whole = same_shape(shape(scores), shape(weights))  # a reshape may divide the keys
    return (scores, None) if whole and a["dim"] in (-1, 3) else None


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


@dataclass(frozen=True)
class _Masked:
    """Logits of which some are hidden: by -inf, or by a number so low that other logits and sinks win."""

    scores: fx.Node
    mask: fx.Node
    hides: bool
    """True if the mask is True for hidden keys; else it is True for those that are seen."""
    lowest: float


def _masked(logits: fx.Node) -> _Masked | None:
    """Reads `scores + where(seen, 0, lowest)`, `scores.masked_fill(hidden, lowest)` and the like."""
    if is_op(logits, aten.add) and arguments(logits).get("alpha", 1) == 1:
        a = arguments(logits)
        orders = (a["self"], a["other"]), (a["other"], a["self"])
        for scores, mask in orders:
            if is_op(mask, aten.where, aten.masked_fill) and value(mask).dtype == value(logits).dtype:
                found = _choice(mask)
                if found is not None and _constant(found[0]) == 0:
                    return _hidden(logits, scores, *found[1:])
        return None
    found = _choice(logits)
    return None if found is None else _hidden(logits, *found)


def _choice(x: fx.Node) -> tuple[Any, Any, bool, float] | None:
    """Returns (kept, mask, hides, lowest) of a tensor that is `kept`, or `lowest` where the mask hides it."""
    if is_op(x, aten.masked_fill):
        a = arguments(x)
        kept, mask, hides, low = a["self"], a["mask"], True, a["value"]
    elif is_op(x, aten.where) and len(x.args) == 3:
        mask, kept, low = x.args
        hides = (_constant(low) or 0) >= 0
        if hides:
            kept, low = low, kept
    else:
        return None
    lowest = _constant(low)
    return None if lowest is None else (kept, mask, hides, lowest)


def _hidden(logits: fx.Node, scores: Any, mask: Any, hides: bool, lowest: float) -> _Masked | None:
    if not is_tensor(scores) or not is_tensor(mask) or not same_shape(shape(scores), shape(logits)):
        return None
    if hides and _inverts(mask):
        mask, hides = operand(mask), False
    alike = value(scores).dtype == value(logits).dtype
    low = lowest <= torch.finfo(value(logits).dtype).min
    return _Masked(scores, mask, hides, lowest) if alike and low else None


def _inverts(mask: fx.Node) -> bool:
    """Returns whether the mask is `~seen` or `seen == 0` of a boolean tensor."""
    inverts = is_op(mask, aten.logical_not, aten.bitwise_not) or (
        is_op(mask, aten.eq) and isinstance(mask.args[1], (int, float)) and mask.args[1] == 0
    )
    return inverts and value(operand(mask)).dtype == torch.bool


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
    """Returns (the product, scale) of `product * scale`, `product / number` or the product alone."""
    scale = 1.0
    if is_op(scores, aten.mul, aten.div) and not scores.kwargs and len(scores.args) == 2:
        product, number = scores.args
        if not is_tensor(product) or not isinstance(number, (int, float)) or number == 0:
            return None
        scale = float(number) if is_op(scores, aten.mul) else 1 / number
        scores = product
    scores = strip(scores)
    return (scores, scale) if is_op(scores, aten.bmm) else None


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
