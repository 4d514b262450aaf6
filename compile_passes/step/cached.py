"""Rewrites fp4::update_cache and fp4::attention of a step of one token to fp4::cached_attention.

On a Hopper GPU, the first is a launch of its own that waits for memory, while few of the GPU's
multiprocessors have anything to do. In attention's kernel, the first keys and values are on their way
meanwhile. A CPU computes the two one after the other, in one call. The result is the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...backends.hopper.trust import cached_attention_kernel
from ...meta.torch_internals import OpOverload
from ...runtime import native
from ..graph.dead_code import erase_unused
from ..graph.nodes import arguments, aten, integer, is_op, is_tensor, operand, shape, static_int, value
from .attention import HEAD_SIZES

fp4 = torch.ops.fp4


def runs(device: torch.device) -> bool:
    """True for a CPU, and for a Hopper GPU on which the kernel passed the check of its first use."""
    return device.type == "cpu" or (native.is_hopper(device) and cached_attention_kernel(device.index or 0))


@dataclass(frozen=True)
class _Pair:
    attention: fx.Node
    update: fx.Node
    between: list[fx.Node]
    """Transposes of the update's result, the last first."""


def write_cached_attention(graph: fx.Graph) -> list[str]:
    """Rewrites the layers of a step of one token. Returns a sentence that says how many."""
    if not any(graph.find_nodes(op="call_function", target=fp4.attention.default)):
        return []
    erase_unused(graph)  # what the passes before have replaced still seems to read queries and caches
    position = {node: i for i, node in enumerate(graph.nodes)}
    found = map(_pair, graph.find_nodes(op="call_function", target=fp4.attention.default))
    pairs = [pair for pair in found if pair is not None and _fits(pair) and _is_alone(pair, position)]
    for pair in pairs:
        _write(graph, pair)
    what = "the update of the cache and attention are one operator"
    return [f"decoding step ({len(pairs)}x): {what} (fp4::cached_attention)"] if pairs else []


def _pair(attention: fx.Node) -> _Pair | None:
    """Reads attention of the queries that an update makes, and that nothing else reads, over its caches."""
    a = arguments(attention)
    between = []
    x, reader = a["q"], attention
    while is_op(x, aten.transpose) and {integer(x, i) % 4 for i in (1, 2)} == {1, 2}:
        if set(x.users) != {reader}:
            return None
        between.append(x)
        x, reader = operand(x), x
    if not isinstance(x, fx.Node) or x.target is not fp4.update_cache.default or set(x.users) != {reader}:
        return None
    given = arguments(x)
    same = all(a[name] is given[name] for name in ("keys", "values"))
    return _Pair(attention, x, between) if same and len(between) % 2 == 0 else None


def _fits(pair: _Pair) -> bool:
    """True if the kernel has these sizes, which the passes for both operators have checked, and one token."""
    a = arguments(pair.update)
    if not all(is_tensor(a[name]) for name in ("q", "v", "keys")):
        return False
    (b, tokens, _, size), value_size = map(static_int, shape(a["q"])), static_int(shape(a["v"])[-1])
    dtype = value(a["q"]).dtype in (torch.bfloat16, torch.float16)
    known = b is not None and tokens == 1 and size in HEAD_SIZES and value_size == size
    return dtype and known and runs(value(a["keys"]).device)


def _is_alone(pair: _Pair, position: dict[fx.Node, int]) -> bool:
    """True if the update may take place as late as attention: nothing before reads the caches, or has a view
    of them, and nothing between the two writes what the update reads.
    """
    a, first, last = arguments(pair.update), position[pair.update], position[pair.attention]
    for cache in (a["keys"], a["values"]):
        readers = set(cache.users) - {pair.update, pair.attention}
        if cache.op != "placeholder" or any(position[reader] < last for reader in readers):
            return False
    return not any(
        first < position[user] < last and _writes(user, x)
        for x in pair.update.all_input_nodes
        for user in x.users
    )


def _writes(node: fx.Node, x: fx.Node) -> bool:
    """True if an operator may write to its argument x."""
    if not isinstance(node.target, OpOverload):
        return False
    given = arguments(node)
    written: list[fx.Node] = []
    fx.map_arg([given[a.name] for a in node.target._schema.arguments if a.is_write], written.append)
    return x in written


def _write(graph: fx.Graph, pair: _Pair) -> None:
    a = arguments(pair.attention)
    sinks = () if a["sinks"] is None else (a["sinks"],)
    with graph.inserting_before(pair.attention):
        made = graph.call_function(
            fp4.cached_attention.default, (*pair.update.args, a["mask"], a["scale"], *sinks)
        )
    made.meta.update(pair.attention.meta)
    pair.attention.replace_all_uses_with(made)
    for node in (pair.attention, *pair.between, pair.update):
        graph.erase_node(node)
