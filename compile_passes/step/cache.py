"""Rewrites what an attention layer does between its products and the attention itself to fp4::update_cache:
the norms of queries and keys, their rotary position embedding, and the write of keys and values to a static
cache.

On a GPU, Inductor makes four kernels of this in a decoding step. Each is short and waits for the one before
it. On a CPU it makes one function, which computes the cosine and the sine of each angle again for each head
of each layer, and stores both halves of each head between two loops.

transformers' static cache also adds the number of new tokens to a counter of each layer. Inductor makes a
kernel of each addition, because nothing else reads the sums. `write_counters` makes one kernel of all.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...backends.hopper.trust import update_cache_kernel
from ...runtime import native
from ..graph.nodes import (
    arguments,
    aten,
    integer,
    is_op,
    is_tensor,
    item,
    operand,
    same_shape,
    shape,
    static_int,
    strip,
    value,
)
from ..graph.repeat import added_number
from .norm import Norm, NotRead, read_norm

fp4 = torch.ops.fp4

DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.bfloat16,)}
HEAD_SIZES = (64, 128, 256)
MAX_TOKENS = 256
"""Most tokens. For more, Inductor's kernels are as fast."""


def runs(device: torch.device) -> bool:
    """True for a CPU, and for a Hopper GPU on which the kernel passed the check of its first use."""
    return device.type == "cpu" or (native.is_hopper(device) and update_cache_kernel(device.index or 0))


@dataclass(frozen=True)
class _Rotated:
    """x * cos + rotated(x) * sin for x [B, H, S, D], a transposed view of heads [B, S, H, D]. cos and sin are
    [B or 1, S, D], or those of half a head, [B or 1, S, D / 2].
    """

    node: fx.Node
    heads: fx.Node
    norm: Norm | None
    cos: fx.Node
    sin: fx.Node

    @property
    def x(self) -> fx.Node:
        return self.heads if self.norm is None else self.norm.x

    @property
    def inputs(self) -> list[fx.Node]:
        weight = [] if self.norm is None else [self.norm.weight]
        return [self.x, self.cos, self.sin, *weight]

    def goes_with(self, other: _Rotated) -> bool:
        """True for the queries and the keys of a layer."""
        angles = (self.cos, self.sin) == (other.cos, other.sin)
        b, _, s, d = shape(self.node)
        alike = same_shape(shape(other.node), (b, shape(other.node)[1], s, d))
        same_eps = self.norm is None or other.norm is None or self.norm.eps == other.norm.eps
        return angles and alike and same_eps and _product(self.x) is _product(other.x)


@dataclass(frozen=True)
class _Write:
    """cache.index_copy_(2, arange(S) + start, x) for x [B, H, S, D], whose only other use is its result."""

    node: fx.Node
    """The cache after the write."""
    cache: fx.Node
    start: fx.Node
    x: fx.Node
    epilogue: fx.Node


@dataclass(frozen=True)
class _Layer:
    q: _Rotated
    k: _Rotated
    v: fx.Node
    """[B, S, H, D]"""
    keys: _Write
    values: _Write


def write_caches(graph: fx.Graph) -> list[str]:
    """Rewrites the layers of a step of few tokens. Returns a sentence that says how many."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    rotated = {found.node: found for node in graph.nodes if (found := _rotated(node)) is not None}
    layers = [layer for layer in _layers(graph, rotated) if _in_order(layer, position)]
    used = [(a, shape(layer.q.node)[-1]) for layer in layers for a in (layer.q.cos, layer.q.sin)]
    wholes = {(angles, size): _of_whole_heads(graph, angles, size) for angles, size in dict.fromkeys(used)}
    for layer in layers:
        _write(graph, layer, position, wholes)
    what = "norms of heads, rotary position embedding and the write to the cache are one kernel"
    return [f"decoding step ({len(layers)}x): {what} (fp4::update_cache)"] if layers else []


def _layers(graph: fx.Graph, rotated: dict[fx.Node, _Rotated]) -> Iterator[_Layer]:
    writes = [found for node in graph.nodes if (found := _cache_write(node)) is not None]
    for keys in writes:
        k = rotated.get(keys.x)
        if k is None or set(k.node.users) != {keys.node}:
            continue
        queries = [q for q in rotated.values() if q is not k and q.goes_with(k)]
        pairs = [v for v in writes if v is not keys and _go_together(keys, v)]
        if len(queries) == len(pairs) == 1:
            yield _Layer(queries[0], k, operand(pairs[0].x), keys, pairs[0])


def _go_together(keys: _Write, values: _Write) -> bool:
    """True if values are written to their cache at the places at which the keys are written to theirs."""
    alike = same_shape(shape(keys.cache), shape(values.cache)) and values.start is keys.start
    return alike and values.cache is not keys.cache and swaps_heads(values.x)


def _cache_write(node: fx.Node) -> _Write | None:
    if not is_op(node, aten.index_copy) or not is_tensor(node):
        return None
    a = arguments(node)
    cache, x, start = a["self"], a["source"], _start(a["index"])
    if cache.op != "placeholder" or a["dim"] not in (2, -2) or value(cache).dim() != 4 or start is None:
        return None
    epilogues = [u for u in cache.users if is_op(u, aten.copy_)]
    if set(cache.users) != {node, *epilogues} or len(epilogues) != 1 or not value(cache).is_contiguous():
        return None
    if epilogues[0].args[:2] != (cache, node) or value(x).dtype != value(cache).dtype:
        return None
    return _Write(node, cache, start, x, epilogues[0])


def _start(places: Any) -> fx.Node | None:
    """Returns start of `arange(S) + start`, for an integer input without dimensions."""
    if not is_op(places, aten.add) or arguments(places).get("alpha", 1) != 1:
        return None
    a = arguments(places)
    for numbers, start in ((a["self"], a["other"]), (a["other"], a["self"])):
        if not (isinstance(start, fx.Node) and start.op == "placeholder" and is_op(numbers, aten.arange)):
            continue
        steps = arguments(numbers)
        if (steps.get("start", 0), steps.get("step", 1)) != (0, 1) or value(numbers).dtype != torch.int64:
            continue
        here = value(start).device == value(numbers).device
        if here and value(start).dim() == 0 and value(start).dtype == torch.int64:
            return start
    return None


def _rotated(node: fx.Node) -> _Rotated | None:
    if not is_op(node, aten.add, aten.cat) or not is_tensor(node):
        return None
    dtype, device = value(node).dtype, value(node).device
    if value(node).dim() != 4 or dtype not in DTYPES.get(device.type, ()):
        return None
    b, _, s, d = map(static_int, shape(node))
    few = b is not None and s is not None and 0 < b * s <= MAX_TOKENS
    if not few or d not in HEAD_SIZES or not runs(device):
        return None
    found = _as_a_sum(node, d) if is_op(node, aten.add) else _as_halves(node, d)
    if found is None:
        return None
    x, cos, sin = found
    size = d if is_op(node, aten.add) else d // 2
    cos, sin = _angles(cos, node, size), _angles(sin, node, size)
    if cos is None or sin is None or not swaps_heads(x):
        return None
    heads = operand(x)
    norm = _norm(heads)
    if norm is not None and norm.in_float:
        norm = None
    return _Rotated(node, heads, norm, cos, sin)


def _norm(node: fx.Node) -> Norm | None:
    try:
        return read_norm(node)
    except NotRead:
        return None


def _as_a_sum(node: fx.Node, d: int) -> tuple[fx.Node, Any, Any] | None:
    """Reads (x, cos, sin) from x * cos + turned(x) * sin."""
    plain, turned = _multiplied(node, aten.add)
    if plain is None or turned is None:
        return None
    (x, cos), (half, sin) = plain, turned
    return (x, cos, sin) if isinstance(x, fx.Node) and _is_turned(half, x, d) else None


def _as_halves(node: fx.Node, d: int) -> tuple[fx.Node, Any, Any] | None:
    """Reads (x, cos, sin) from cat([low * cos - high * sin, high * cos + low * sin], -1), where low and high
    are the halves of x. Rounds where `_as_a_sum` does.
    """
    a = arguments(node)
    if a["dim"] not in (-1, 3) or len(a["tensors"]) != 2:
        return None
    first, second = a["tensors"]
    (lows, highs), (highs_too, lows_too) = _multiplied(first, aten.sub), _multiplied(second, aten.add)
    if lows is None or highs is None or highs_too is None or lows_too is None:
        return None
    (low, cos), (high, sin) = lows, highs
    if highs_too != (high, cos) or lows_too != (low, sin):
        return None
    x = _whole(low)
    if x is None or static_int(shape(x)[-1]) != d:
        return None
    halves = _is_half(low, x, 0, d // 2) and _is_half(high, x, d // 2, d)
    return (x, cos, sin) if halves else None


Factors = tuple[Any, Any]


def _multiplied(node: Any, packet: Any) -> tuple[Factors, Factors] | tuple[None, None]:
    """Returns the factors of both operands of a sum or a difference of products."""
    if not is_op(node, packet) or arguments(node).get("alpha", 1) != 1:
        return None, None
    a = arguments(node)
    first, second = a["self"], a["other"]
    if not (is_op(first, aten.mul) and is_op(second, aten.mul)):
        return None, None
    return (first.args[0], first.args[1]), (second.args[0], second.args[1])


def swaps_heads(x: fx.Node) -> bool:
    """True for a view [B, H, S, D] of [B, S, H, D]."""
    if not is_op(x, aten.transpose) or value(x).dim() != 4:
        return False
    return {integer(x, i) % 4 for i in (1, 2)} == {1, 2}


def _is_turned(node: Any, x: fx.Node, d: int) -> bool:
    """True for cat([-x[..., d/2:], x[..., :d/2]], -1)."""
    if not is_op(node, aten.cat):
        return False
    a = arguments(node)
    if a["dim"] not in (-1, 3) or len(a["tensors"]) != 2:
        return False
    high, low = a["tensors"]
    return is_op(high, aten.neg) and _is_half(operand(high), x, d // 2, d) and _is_half(low, x, 0, d // 2)


def _whole(half: Any) -> fx.Node | None:
    """Returns what a tensor may be half of."""
    made = item(half)
    half = half if made is None else made[0]
    return operand(half) if is_op(half, aten.slice, aten.split) else None


def _is_half(node: Any, x: fx.Node, start: int, end: int) -> bool:
    made = item(node)
    if made is not None and is_op(made[0], aten.split):
        a, size = arguments(made[0]), end - start
        split = a["self"] is x and a["dim"] in (-1, 3) and a["split_size"] == size
        return split and made[1] * size == start
    if not is_op(node, aten.slice):
        return False
    a = arguments(node)
    last = shape(x)[-1] if a["end"] is None else min(a["end"], shape(x)[-1])
    return a["self"] is x and a["dim"] in (-1, 3) and ((a["start"] or 0), last, a["step"]) == (start, end, 1)


def _angles(node: Any, rotated: fx.Node, size: int) -> fx.Node | None:
    """Returns cos or sin [B or 1, S, size], given with a dimension for the heads."""
    if not is_op(node, aten.unsqueeze) or integer(node, 1) not in (1, -3):
        return None
    found = operand(node)
    b, _, s, _ = shape(rotated)
    fits = any(same_shape(shape(found), (n, s, size)) for n in (1, b))
    return found if fits and value(found).dtype == value(rotated).dtype else None


def _product(x: fx.Node) -> fx.Node:
    """Follows x back to what the queries and keys of a layer share: the rows that products read, or what is
    split into heads. This only finds the queries of some keys. The proof does not need it.
    """
    x = strip(x)
    norm = _norm(x)  # of the whole projection
    x = x if norm is None else strip(norm.x)
    if item(x) is not None:
        made = operand(x)
        return strip(operand(made)) if is_op(made, fp4.linears) else made
    if is_op(x, aten.mm, aten.addmm, fp4.mm):
        rows = strip(operand(x, 1 if is_op(x, aten.addmm) else 0))
        return rows if item(rows) is None else operand(rows)  # fp4::quantize_int8 makes rows and scales
    return x


def _inputs(layer: _Layer) -> list[fx.Node]:
    held = [layer.keys.cache, layer.values.cache, layer.keys.start]
    return [*layer.q.inputs, *layer.k.inputs, layer.v, *held]


def _in_order(layer: _Layer, position: dict[fx.Node, int]) -> bool:
    """True if nothing reads a result of the operator before all that it reads has been computed."""
    last = max(position[node] for node in _inputs(layer))
    results = (layer.q.node, layer.keys.node, layer.values.node)
    users = [user for node in results for user in node.users]
    return all(user.op != "output" and position[user] > last for user in users)


def _of_whole_heads(graph: fx.Graph, angles: fx.Node, d: int) -> fx.Node:
    """Returns cos or sin of all d elements of a head."""
    if static_int(shape(angles)[-1]) == d:
        return angles
    with graph.inserting_after(angles):
        whole = graph.call_function(aten.cat.default, ([angles, angles], -1))
    whole.meta["val"] = torch.cat([value(angles)] * 2, -1)
    return whole


def _write(
    graph: fx.Graph, layer: _Layer, position: dict[fx.Node, int], wholes: dict[tuple[fx.Node, Any], fx.Node]
) -> None:
    q, k, keys, values = layer.q, layer.k, layer.keys, layer.values
    norms = [None if its.norm is None else its.norm.weight for its in (q, k)]
    eps = next((its.norm.eps for its in (q, k) if its.norm is not None), 0.0)
    last = max(_inputs(layer), key=position.__getitem__)
    with graph.inserting_after(wholes.get((last, shape(layer.q.node)[-1]), last)):
        made = graph.call_function(
            fp4.update_cache.default,
            (
                q.x,
                k.x,
                layer.v,
                wholes[q.cos, shape(q.node)[-1]],
                wholes[q.sin, shape(q.node)[-1]],
                *norms,
                eps,
                keys.cache,
                values.cache,
                keys.start,
            ),
        )
    with graph.inserting_after(made):
        turned = graph.call_function(aten.transpose.int, (made, 1, 2))
    turned.meta.update(q.node.meta)
    q.node.replace_all_uses_with(turned)
    for write in (keys, values):
        graph.erase_node(write.epilogue)
        write.node.replace_all_uses_with(write.cache)
        graph.erase_node(write.node)


# --- counters of tokens ---

COUNTED_ON = ("cuda",)
"""Devices for which Inductor makes one kernel of aten._foreach_add."""


def write_counters(graph: fx.Graph) -> list[str]:
    """Rewrites counters of one number each, to which only a sum is written. Returns a sentence about them."""
    alike: defaultdict[tuple[torch.device, torch.dtype, int], list[fx.Node]] = defaultdict(list)
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        held, number = value(_written(write)[0]), _added(write)
        if number is not None:
            alike[held.device, held.dtype, number].append(write)
    done = 0
    for (_, _, number), writes in alike.items():
        if len(writes) > 1:
            _write_sums(graph, writes, number)
            done += len(writes)
    return [f"decoding step: {done} counters of tokens are one kernel (aten._foreach_add)"] if done else []


def _added(write: fx.Node) -> int | None:
    """Returns the number that is added to a counter, an input of one integer; else None."""
    target, total = _written(write)
    if target.op != "placeholder" or not isinstance(total, fx.Node) or set(total.users) != {write}:
        return None
    held = value(target)
    alone = held.device.type in COUNTED_ON and held.numel() == 1
    return added_number(target, total) if alone else None


def _written(write: fx.Node) -> tuple[fx.Node, fx.Node]:
    a = arguments(write)
    return a["self"], a["src"]


def _write_sums(graph: fx.Graph, writes: list[fx.Node], number: int) -> None:
    with graph.inserting_before(writes[0]):
        sums = graph.call_function(aten._foreach_add.Scalar, ([_written(w)[0] for w in writes], number))
        made = [graph.call_function(operator.getitem, (sums, i)) for i in range(len(writes))]
    for write, new in zip(writes, made, strict=True):
        old = _written(write)[1]
        new.meta.update(old.meta)
        write.replace_input_with(old, new)
        graph.erase_node(old)
