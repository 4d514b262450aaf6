"""Facts about the weights of one graph, beside those of torch in `node.meta`: which weights are decoded from
4 bits, and whether all uses of a weight can be in 4 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from ...runtime.relayout import relayout
from ..graph.nodes import (
    CUTS,
    PRODUCTS,
    RESHAPES,
    SWAPS,
    arguments,
    aten,
    behind,
    is_op,
    is_product,
    is_pure,
    is_tensor,
    reached,
    shape,
)
from ..refusal import Kind, Refusal, Refused
from .specs import Parts, Prequantized


class Stored(NamedTuple):
    """A weight that the model holds in 4 bits: how it is read, and the graph inputs that hold it."""

    way: Prequantized
    inputs: tuple[fx.Node, ...]


Stays = dict[int, Refusal]
"""Indices of inputs, each with the reason why its products are rewritten one by one, or why it keeps its
weights."""
T = TypeVar("T")


@dataclass
class Facts:
    fixed: set[fx.Node]
    """Parameters, buffers, and weights that are decoded from these. They are the same tensors in every
    call."""
    mutated: set[fx.Node] = field(default_factory=set)
    """Inputs that the graph writes to."""
    stored: dict[fx.Node, Stored] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)
    """Values of small tensors: the current values of fixed inputs, and tensors that the graph makes from
    numbers."""
    tables: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    """For each `fp4.dequantize` that replaces a decoding: the inputs whose values the decoding uses as
    tables."""
    gathered: dict[fx.Node, str] = field(default_factory=dict)
    """For each parameter that is gathered for each call: the name of the library that gathers it."""
    each_alone: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Weights whose products are rewritten one by one, with the reason."""
    stays: dict[fx.Node, Refusal] = field(default_factory=dict)
    """Weights that are left alone, with the reason."""

    def note_stays(self, i: int, node: fx.Node, each: Stays, stay: Stays) -> None:
        """Note what `in_one_precision` says about input i of a graph, which is `node`."""
        if i in stay:
            self.stays[node] = stay[i]
        elif i in each:
            self.each_alone[node] = each[i]

    def in_4_bits(self, weight: fx.Node) -> bool:
        return weight in self.stored

    def inputs_of(self, weight: fx.Node) -> tuple[fx.Node, ...]:
        """Return the graph inputs that hold a weight: the weight itself, or the inputs from which the
        graph decodes it."""
        return self.stored[weight].inputs if weight in self.stored else (weight,)

    def why_not_own(self, weight: fx.Node, site: fx.Node) -> Refusal | None:
        """Return why one packed copy cannot replace the weight in all calls, or None if it can."""
        if weight in self.mutated:
            return Refusal(Kind.WRITTEN, site, (weight,))
        if weight in self.gathered:
            return Refusal(Kind.GATHERED_ANEW, site, (self.gathered[weight], weight))
        return replace(self.stays[weight], node=site) if weight in self.stays else None

    def need_own(self, weight: fx.Node, site: fx.Node) -> None:
        why = self.why_not_own(weight, site)
        if why is not None:
            raise Refused(why)


fp4 = torch.ops.fp4


@dataclass(frozen=True)
class Program:
    """Computes the operands of `fp4.dequantize` from fixed graph inputs, once, when the operands are made.

    It contains the nodes between the inputs and the arguments of `fp4.dequantize`, such as views, stacks or a
    reciprocal. Programs with the same code are equal.
    """

    code: str
    format: str
    layout: str
    k: int
    tables: tuple[tuple[float, ...], ...]
    """Tables of values that the last inputs held when the decoding was proved."""
    run: fx.GraphModule = field(compare=False)

    def __call__(self, *inputs: Tensor) -> Parts:
        given = len(inputs) - len(self.tables)
        for now, proved in zip(inputs[given:], self.tables):
            if tuple(now.flatten().tolist()) != proved:
                raise RuntimeError(
                    "fp4: a table from which the model decodes its weights has changed; compile it again"
                )
        inputs = inputs[:given]
        return relayout(self.run(*inputs), self.format, self.k, self.layout, "plain")


def note_decoded(graph: fx.Graph, facts: Facts) -> None:
    """Note the nodes that are weights held in 4 bits, and how they are read."""
    inputs = facts.fixed - facts.mutated
    for node in graph.nodes:
        stored = _stored(node, inputs, facts) if is_op(node, fp4.dequantize) else None
        if stored is not None:
            facts.stored[node] = stored
            facts.fixed.add(node)


def _stored(node: fx.Node, fixed: set[fx.Node], facts: Facts) -> Stored | None:
    a = arguments(node)
    operands = [a["packed"], a["block_scale"], a["global_scale"]]
    extracted = _extract([n for n in operands if n is not None], fixed)
    if extracted is None:
        return None
    inputs, gm = extracted
    tables = facts.tables.get(node, ())
    values = tuple(tuple(facts.constants[t].flatten().tolist()) for t in tables)
    program = Program(gm.code, a["format"], a["layout"], int(shape(node)[-1]), values, gm)
    inputs = (*inputs, *tables)
    return Stored(Prequantized("fp4.dequantize", a["format"], program, inputs=len(inputs)), inputs)


def _extract(
    outputs: list[fx.Node], fixed: set[fx.Node]
) -> tuple[tuple[fx.Node, ...], fx.GraphModule] | None:
    """Return (inputs, a program from them to three outputs), if the outputs depend only on fixed inputs."""
    needed = behind(*outputs)
    if not all(n in fixed or (n.op == "call_function" and is_pure(n) and is_tensor(n)) for n in needed):
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    for node in outputs[0].graph.nodes:
        if node in needed and node.op == "placeholder":
            copies[node] = graph.placeholder(f"given_{len(inputs)}")
            inputs.append(node)
    for node in outputs[0].graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    results = [copies[n] for n in outputs]
    graph.output((*results, None)[:3])
    return tuple(inputs), fx.GraphModule(torch.nn.Module(), graph)


_PARTS = (
    *(*RESHAPES, *SWAPS, *CUTS, aten.unbind, aten.expand, aten._to_copy),
    *(aten.index, aten.index_select, aten.cat, aten.stack),
)


class ReadTwice(Exception):
    """Raised if some products of a weight were rewritten to 4 bits and others were not. A model must not read
    one expert in two precisions.

    `why`: for the index of each such graph input, the product that reads it.
    """

    def __init__(self, products: dict[int, tuple[fx.Node, fx.Node]]) -> None:
        super().__init__("some uses of a weight would run in 4 bits, and others not")
        self.why = {i: Refusal(Kind.OTHER_USERS, both[1], both) for i, both in products.items()}


def in_one_precision(rewrite: Callable[[Stays, Stays], T]) -> T:
    """Return `rewrite(each, stay)`. More weights go into one of the two until none is read in two precisions.

    each: inputs whose products are rewritten one by one.
    stay: inputs that keep their original weights.
    """
    each: Stays = {}
    stay: Stays = {}
    while True:
        try:
            return rewrite(each, stay)
        except ReadTwice as found:
            if not found.why.keys() - stay.keys():
                raise
            again = {i: replace(why, kind=Kind.BLOCK_STAYS) for i, why in found.why.items() if i in each}
            each, stay = {**found.why, **each}, {**again, **stay}


def refuse_two_precisions(
    inputs: list[fx.Node], packed: Iterable[fx.Node], others: Collection[fx.Node] = ()
) -> None:
    """Raises ReadTwice if an input in `packed` is an operand of a product that is not in `others`."""
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
