"""Rewrites a step's counters of tokens, one for each layer's cache, to one kernel.

transformers' static cache adds the number of new tokens to a tensor of each layer. Inductor makes a kernel of
each addition, since nothing else reads the sums.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

from ..graph.nodes import arguments, aten, value
from ..graph.repeat import added_number

DEVICES = ("cuda",)
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
            _write(graph, writes, number)
            done += len(writes)
    return [f"decoding step: {done} counters of tokens are one kernel (aten._foreach_add)"] if done else []


def _added(write: fx.Node) -> int | None:
    """Returns the number that is added to a counter, an input of one integer; else None."""
    target, total = _written(write)
    if target.op != "placeholder" or not isinstance(total, fx.Node) or set(total.users) != {write}:
        return None
    held = value(target)
    alone = held.device.type in DEVICES and held.numel() == 1
    return added_number(target, total) if alone else None


def _written(write: fx.Node) -> tuple[fx.Node, fx.Node]:
    a = arguments(write)
    return a["self"], a["src"]


def _write(graph: fx.Graph, writes: list[fx.Node], number: int) -> None:
    with graph.inserting_before(writes[0]):
        sums = graph.call_function(aten._foreach_add.Scalar, ([_written(w)[0] for w in writes], number))
        made = [graph.call_function(operator.getitem, (sums, i)) for i in range(len(writes))]
    for write, new in zip(writes, made, strict=True):
        old = _written(write)[1]
        new.meta.update(old.meta)
        write.replace_input_with(old, new)
        graph.erase_node(old)
