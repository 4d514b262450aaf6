"""Rewrites a router's fp4::linears and the fp4::top_experts of its result to one fp4::router.

On a GPU, a kernel that chooses a few experts waits for the logits longer than it chooses. On a CPU, the call
of an operator takes about as long as the choice. This pass comes after those that write the two operators
(linears.py, neighbours/topk.py).
"""

from __future__ import annotations

import operator
from math import prod

import torch
from torch import fx

from ...backends.hopper.trust import router_kernel
from ...runtime import native
from ..graph.nodes import (
    arguments,
    aten,
    integer,
    is_op,
    is_tensor,
    item,
    operand,
    shape,
    static_int,
    strip,
    value,
)

fp4 = torch.ops.fp4

MAX_ROWS, MAX_EXPERTS, MAX_CHOSEN = 8, 128, 16
MAX_BYTES = 2**20
"""Eight thread blocks hold the whole weight in shared memory."""
WHOLE = ("cpu",)
"""Devices whose operator takes all that the two operators take."""
OWN = 3
"""Number of results before the norm's result and the sum: logits, weights, ids."""


def has_kernel(device: torch.device) -> bool:
    """True for a Hopper GPU on which the kernel passed the check of its first use."""
    return native.is_hopper(device) and router_kernel(device.index or 0)


def write_router(graph: fx.Graph) -> list[str]:
    """Rewrites each pair of operators that qualifies. Returns a sentence that says how many."""
    done = 0
    for choice in graph.find_nodes(op="call_function", target=fp4.top_experts.default):
        product = _product(choice)
        if product is not None:
            _write(graph, product, choice)
            done += 1
    what = "a router's fp4::linears and fp4::top_experts are one operator (fp4::router)"
    return [f"decoding step ({done}x): {what}"] if done else []


def _product(choice: fx.Node) -> fx.Node | None:
    """Returns the fp4::linears whose only product is the logits, if the kernel takes both; else None."""
    logits = operand(choice)
    made = item(strip(logits))
    if made is None or made[1] != 0 or not is_op(made[0], fp4.linears):
        return None
    a, a_choice = arguments(made[0]), arguments(choice)
    x = a["x"]
    if len(a["weights"]) != 1 or a["residual"] is not None or not is_tensor(x) or not is_tensor(logits):
        return None
    (weight,) = a["weights"]
    if static_int(shape(logits)[-1]) != shape(weight)[0]:
        return None
    whole = value(x).device.type in WHOLE
    return made[0] if whole or _has_kernel_for(x, weight, logits, a_choice["k"]) else None


def _has_kernel_for(x: fx.Node, weight: fx.Node, logits: fx.Node, chosen: int) -> bool:
    rows = [static_int(n) or MAX_ROWS + 1 for n in shape(x)[:-1]]  # a symbolic number counts as many
    experts, k = map(int, shape(weight))
    # The kernel's shared memory has room for 64 experts or for 128, however many there are.
    held = (64 if experts <= 64 else MAX_EXPERTS) * k * value(weight).element_size()
    dtype = value(x).dtype
    return (
        prod(rows) <= MAX_ROWS
        and experts <= MAX_EXPERTS
        and chosen <= MAX_CHOSEN
        and held <= MAX_BYTES
        and dtype in (torch.bfloat16, torch.float16)
        and value(logits).dtype == dtype
        and has_kernel(value(x).device)
    )


def _write(graph: fx.Graph, product: fx.Node, choice: fx.Node) -> None:
    a, by = arguments(product), arguments(choice)
    given = (a["x"], *a["weights"], *a["biases"], a["norm_weight"], a["eps"], a["addend"], by["k"])
    options = {name: a[name] for name in ("early", "keep_norm", "norm_in_float") if a[name]}
    options |= {name: by[name] for name in ("softmax", "normalize") if by[name]}
    options["out_dtype"] = by["out_dtype"]
    with graph.inserting_before(product):
        out = graph.call_function(fp4.router.default, given, options)
    for user in list(product.users):
        i = integer(user, 1)
        user.args = (out, i if i == 0 else i + OWN - 1)
    for user in list(choice.users):
        if user.users:
            _write_chosen(graph, user, out)
        graph.erase_node(user)
    graph.erase_node(choice)
    graph.erase_node(product)


def _write_chosen(graph: fx.Graph, old: fx.Node, out: fx.Node) -> None:
    """Replaces the weights or the ids of fp4::top_experts, whose rows may be given with other dimensions."""
    with graph.inserting_before(old):
        its = graph.call_function(operator.getitem, (out, integer(old, 1) + 1))
        new = graph.call_function(aten.reshape.default, (its, [*map(static_int, shape(old))]))
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
