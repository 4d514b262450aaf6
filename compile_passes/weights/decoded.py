"""Handles weights that a graph decodes from 4-bit codes: `fp4.dequantize` of fixed inputs.

The operators between the inputs and the operator's arguments (views, stacks, a reciprocal) become a
`Program`. It runs once, when the operands are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ...runtime.relayout import relayout
from ..graph.nodes import arguments, is_op, is_pure, is_tensor, shape
from ..graph.walks import behind
from .facts import Facts, Stored
from .prequantized import Parts, Prequantized

fp4 = torch.ops.fp4


@dataclass(frozen=True)
class Program:
    """Computes the operands of `fp4.dequantize` from fixed graph inputs. Programs with the same code are
    equal."""

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
                    "fp4: a table from which the model decodes its weights has changed; compile anew"
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
