"""Makes sure that all uses of a weight are in 4 bits or none: a model must not read one expert in two
precisions."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

from torch import fx

from ..graph.nodes import CUTS, PRODUCTS, RESHAPES, SWAPS, aten, is_op, is_product
from ..graph.walks import reached
from ..refusal import Kind, Refusal

_PARTS = (
    *(*RESHAPES, *SWAPS, *CUTS, aten.unbind, aten.expand, aten._to_copy),
    *(aten.index, aten.index_select, aten.cat, aten.stack),
)


class ReadTwice(Exception):
    """Products that were not rewritten read weights that others read in 4 bits.

    `why`: for the index of each such graph input, the product that reads it.
    """

    def __init__(self, products: dict[int, tuple[fx.Node, fx.Node]]) -> None:
        super().__init__("some uses of a weight would run in 4 bits, and others not")
        self.why = {i: Refusal(Kind.OTHER_USERS, both[1], both) for i, both in products.items()}


def refuse_two_precisions(
    inputs: list[fx.Node], packed: Iterable[fx.Node], others: Collection[fx.Node] = ()
) -> None:
    """Raises ReadTwice if an input that is `packed` is an operand of a product that is none of `others`."""
    chosen = set(packed)
    found = {i: (n, _product_of(n, others)) for i, n in enumerate(inputs) if n in chosen}
    products = {i: (n, p) for i, (n, p) in found.items() if p is not None}
    if products:
        raise ReadTwice(products)


def written_before(graph: fx.Graph, weights: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for each product, which of these weights it reads after the graph has written to the weight."""
    found: dict[fx.Node, fx.Node] = {}
    for product in graph.nodes if weights else ():
        for operand in product.all_input_nodes if is_product(product) else ():
            node, changed = operand, False
            while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
                changed = changed or not _is_part(node)
                node = node.args[0] if not is_op(node, *PRODUCTS) else None
            if changed and node in weights and node.meta["val"].dim() >= 2:
                found[product] = node
    return found


def _product_of(weight: fx.Node, others: Collection[fx.Node]) -> fx.Node | None:
    """Return a product with this weight or an unchanged part of it."""
    parts = reached(weight.users, lambda n: n.users if _is_part(n) else ())
    return next((n for n in parts if is_product(n) and n not in others), None)


def _is_part(node: fx.Node) -> bool:
    return is_op(node, *_PARTS) or node.target is operator.getitem
