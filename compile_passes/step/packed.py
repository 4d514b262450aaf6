"""Rewrites products of the same int8 rows and 4-bit weights to one call of fp4::packed_linears, on a CPU.

An attention layer quantises its rows once and calls fp4::mm three times. In a decoding step a call takes as
long as the work of a small weight, and at the end of each call all threads wait for each other.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.nodes import arguments, aten, is_op, is_tensor, item, value

fp4 = torch.ops.fp4

PACKED_LINEARS = "fp4::packed_linears"


@dataclass(frozen=True)
class _Product:
    """fp4::mm of int8 rows."""

    node: fx.Node
    arguments: Mapping[str, Any]

    @property
    def weight(self) -> tuple[fx.Node | None, ...]:
        return tuple(self.arguments[name] for name in ("b", "b_scale", "b_global_scale", "bias"))

    @property
    def options(self) -> dict[str, Any]:
        names = {name: self.arguments[name] for name in ("format", "layout")}
        out_dtype = self.arguments["out_dtype"] or torch.bfloat16  # fp4::mm's own default for int8 rows
        return {**names, "a_format": "int8", "out_dtype": out_dtype}

    @property
    def kind(self) -> tuple[Any, ...]:
        """Products of one call have the same."""
        return *self.options.values(), value(_source(self.arguments["b_scale"])).dtype


def write_packed_linears(graph: fx.Graph, written: Collection[fx.Node]) -> set[fx.Node]:
    """Rewrites rows that are quantised to int8 for products only, and these products. The bits stay.

    written: inputs that the graph writes to, which cannot be weights. Returns the products, which the graph
    no longer has.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    done: set[fx.Node] = set()
    for rows in graph.find_nodes(op="call_function", target=fp4.quantize_int8.default):
        products = sorted(_products(rows), key=lambda p: order[p.node])
        operands = [t for p in products for t in p.weight if t is not None]
        if products and all(order[t] < order[rows] and t not in written for t in map(_source, operands)):
            _write(graph, rows, products)
            done |= {product.node for product in products}
    return done


def _source(operand: fx.Node) -> fx.Node:
    """Returns the tensor that an operand is, or whose part it is."""
    return operand.all_input_nodes[0] if is_op(operand, aten.select) else operand


def _products(rows: fx.Node) -> list[_Product]:
    """Returns the products that read quantised rows. Returns none if they are of several kinds, or if
    something else reads the rows, too."""
    x = rows.args[0]
    if not is_tensor(x) or value(x).device.type != "cpu" or value(x).dim() != 2:
        return []
    parts = {part: found[1] for part in rows.users if (found := item(part)) is not None}
    users = {user for part in rows.users for user in part.users}
    if len(parts) < len(rows.users) or any(user.target is not fp4.mm.default for user in users):
        return []
    products = [_Product(user, arguments(user)) for user in users]
    for product in products:
        a = product.arguments
        read = {name: parts[given] for name, given in a.items() if given in parts}
        if read != {"a": 0, "a_scale": 1} or a["a_format"] or a["a_global_scale"] is not None:
            return []
        if not is_tensor(_source(a["b_scale"])):
            return []
    return products if len({p.kind for p in products}) == 1 else []


def _write(graph: fx.Graph, rows: fx.Node, products: list[_Product]) -> None:
    for weight in (t for p in products for t in p.weight if t is not None):
        if is_op(weight, aten.select):
            rows.prepend(weight)
    lists = [list(each) for each in zip(*(p.weight for p in products))]
    with graph.inserting_before(rows):
        out = graph.call_function(fp4.packed_linears.default, (rows.args[0], *lists), products[0].options)
        made = [graph.call_function(operator.getitem, (out, i)) for i in range(len(products))]
    for product, y in zip(products, made):
        y.meta.update(product.node.meta)
        product.node.replace_all_uses_with(y)
        graph.erase_node(product.node)
    for node in (*rows.users, rows):
        graph.erase_node(node)
