"""Lets Dynamo capture loops over the experts that are hit as loops over all experts.

    hit = (mask.sum((1, 2)) > 0).nonzero()
    for e in hit: ...  # experts[e], torch.where(mask[e]), f"expert_{e[0]}"
    for e in ids.unique(): ...  # experts[e], torch.where(ids == e)

skips experts for which the mask has no element set. This module traces the loop over all experts. Each expert
is a tensor with a known value (`known_values.py`), and each round is proved to do nothing if the mask has no
element set for it (`branches.py`, `empty_rows.py`). This file proves the properties of the loop: its experts
are exactly those for which the mask has an element set, and nothing writes to the mask or the hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.nodes import operand
from ..graph.traced_nodes import along, called, example, kept, named, same_elements, since, writes_to
from . import api, known_values
from .branches import is_kept, keep_loop, watch
from .bytecode import only_iterates
from .empty_rows import Hits, Named, Nothing, Way
from .rules import answers, is_watched, new_list

if TYPE_CHECKING:
    from .api import Handler, Instruction, Tracer, Variable


@dataclass
class _Loop:
    hits: Hits
    begins: Instruction
    """If the proof fails, Dynamo starts over and leaves this instruction as it is."""
    like: torch.Tensor | None
    """Tensor that the loop iterates over, if its variable is a tensor."""


_LOOP = "_fp4_hits"
"""Name of an attribute. If one of Dynamo's lists or iterators stands for hits, the attribute holds its
`_Loop`."""


def over_experts(method: Handler) -> Handler:
    def get_iter(tx: Tracer, inst: Instruction) -> None:
        loop = vars(tx.stack[-1]).get(_LOOP)
        if loop is None and not is_watched(tx):
            hits = _hits(tx.stack[-1]) if not is_kept(tx, inst) else None
            if hits is None and _is_of_data(tx.stack[-1]) and not is_kept(tx, inst):
                keep_loop(tx)
            if hits is not None:
                loop = _Loop(hits, inst, example(tx.stack[-1].as_proxy().node))
                tx.stack[-1] = _rounds(loop, as_rows=False)
        elif loop is not None and (is_watched(tx) or is_kept(tx, loop.begins)):
            loop = None
        method(tx, inst)
        if loop is not None:
            vars(tx.stack[-1])[_LOOP] = loop

    return get_iter


def one_expert(method: Handler) -> Handler:
    def for_iter(tx: Tracer, inst: Instruction) -> None:
        loop, after = vars(tx.stack[-1]).get(_LOOP), tx.instruction_pointer
        method(tx, inst)
        if loop is None or tx.instruction_pointer != after:
            return
        e = tx.stack[-1].as_python_constant()
        e = e[0] if isinstance(e, list) else e
        way = Way(tx, Nothing(hits=loop.hits, expert=e), after - 1)
        if loop.like is not None:
            tx.stack[-1] = known_values.create(tx, e, loop.like)
        watch(tx, way, loop.begins, replaced=True)

    return for_iter


@answers
def as_list(tx: Tracer, hit: Variable) -> Variable | None:
    """Replace `hit.tolist()`, if it is only iterated over, by a list of all experts."""
    here = tx.instructions[tx.instruction_pointer - 1]
    hits = _hits(hit) if not is_watched(tx) and not is_kept(tx, here) else None
    if hits is None or not only_iterates(tx, alone=True):
        return None
    loop = _Loop(hits, here, None)
    numbers = _rounds(loop, as_rows=example(hit.as_proxy().node).dim() == 2)
    vars(numbers)[_LOOP] = loop
    return numbers


def _rounds(loop: _Loop, as_rows: bool) -> Variable:
    experts = [api.ConstantVariable.create(e) for e in range(loop.hits.rounds)]
    if as_rows:
        experts = [new_list([e]) for e in experts]
    return new_list(experts)


_MOST_ROUNDS = 1024
"""The most rounds of a loop, more than any model has experts. Tracing a round takes Dynamo up to 0.1 s."""


def _hits(v: Variable) -> Hits | None:
    """Return the hits whose numbers one of Dynamo's variables holds: a tensor [n], or [n, 1]."""
    if not isinstance(v, api.TensorVariable):
        return None
    hits = v.as_proxy().node
    if not isinstance(example(hits), torch.Tensor) or example(hits).shape[1:] not in ((), (1,)):
        return None
    chain = [hits]
    while (before := _same_hits(chain[-1])) is not None:
        chain.append(before)
    among = _unique(chain[-1])
    if among is not None:
        return _named_in(among, chain)
    some = _where(chain[-1])
    if some is None or example(some).dim() != 1:
        return None
    found = _anything(some, 0, chain)
    if found is None:
        return None
    mask, dim = found
    steps = along(mask, dim)
    source, dim = steps[-1]
    chain += [node for node, _ in steps]
    experts = example(source).shape[dim]
    if not isinstance(experts, int) or not _counts(mask) or writes_to(chain, since(source)):
        return None
    rounds = _most(source, dim, experts)
    return Hits(source, dim, rounds) if rounds <= _MOST_ROUNDS else None


def _is_of_data(v: Variable) -> bool:
    """Return whether only the data knows how many rounds a loop over a tensor has."""
    made = example(v.as_proxy().node) if isinstance(v, api.TensorVariable) else None
    return isinstance(made, torch.Tensor) and made.dim() > 0 and bool(free_unbacked_symbols(made.shape[0]))


def _unique(node: fx.Node) -> fx.Node | None:
    """Return the ids if `node` has their distinct numbers in order."""
    part = named(node, ("getitem",), ("input", "item"))
    if part.get("item") == 0 and isinstance(part["input"], fx.Node):
        node = part["input"]
    asked = named(node, ("unique",), ("input", "sorted", "return_inverse", "return_counts", "dim"))
    return asked.get("input") if asked.get("sorted", True) is True and asked.get("dim") is None else None


def _named_in(ids: fx.Node, chain: list[fx.Node]) -> Hits | None:
    """Return the experts that occur among ids, out of all experts from which the ids were chosen."""
    experts = chosen_from(ids)
    source = same_elements(ids)
    if experts is None or experts > _MOST_ROUNDS or example(ids).is_floating_point():
        return None
    if writes_to([*chain, *source], since(source[-1])):
        return None
    return Named(source[-1], 0, experts)


def _same_hits(node: fx.Node) -> fx.Node | None:
    """Return a node with the same numbers as `node`, as a column or in one dimension."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    name, before = called(node), node.args[0]
    shape = example(before).shape if isinstance(example(before), torch.Tensor) else None
    if shape is None or shape[1:] not in ((), (1,)):
        return None
    if name in ("cpu", "long", "clone", "contiguous", "detach"):
        return before
    if name in ("flatten", "ravel") and len(node.args) == 1 and not node.kwargs:
        return before
    if name in ("view", "reshape") and node.args[1:] in ((-1,), ((-1,),), (-1, 1), ((-1, 1),)):
        return before
    if name == "squeeze" and named(node, ("squeeze",), ("input", "dim")).get("dim") in (1, -1):
        return before
    every = (slice(None), slice(None, None, None), Ellipsis)
    if name == "getitem" and (node.args[1] in every or node.args[1] in ((slice(None), 0), (Ellipsis, 0))):
        return before if node.args[1] in every or len(shape) == 2 else None
    return None


def _where(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose nonzero positions `node` has, or None."""
    part = named(node, ("getitem",), ("input", "item"))
    if part.get("item") == 0:
        several = named(part["input"], ("where",), ("condition",)).get("condition")
        asked = named(part["input"], ("nonzero",), ("input", "as_tuple"))
        return several if several is not None else asked.get("input") if asked.get("as_tuple") else None
    asked = named(node, ("nonzero", "argwhere"), ("input", "as_tuple"))
    return asked.get("input") if not asked.get("as_tuple") else None


_MORE_THAN = {
    "gt": 0, "greater": 0, "ne": 0, "not_equal": 0, "ge": 1, "greater_equal": 1,
}  # fmt: skip


def _anything(node: fx.Node, dim: int, chain: list[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return a mask and its dimension, if element i of `node` along `dim` says whether the mask has any
    element set at position i."""
    chain.append(node)
    name = called(node)
    compared = named(node, tuple(_MORE_THAN), ("input", "other"))
    if compared:
        than = compared.get("other")
        at_all = type(than) in (int, float) and than == _MORE_THAN[name.strip("_")]
        return _anything(compared["input"], dim, chain) if at_all else None
    if name in ("bool", "long", "int") and len(node.args) == 1:
        return _anything(operand(node), dim, chain)
    summed = named(node, ("sum", "any", "count_nonzero", "amax"), ("input", "dim", "keepdim"))
    if not summed:
        return node, dim
    of, dims = summed["input"], summed.get("dim")
    if not isinstance(of, fx.Node) or summed.get("keepdim") or dims is None:
        return None
    return _anything(of, kept(example(of).dim(), dims)[dim], chain)


def _counts(node: object) -> bool:
    """Return whether no element is negative, so that a sum of 0 means that all are 0. This holds for one-hot
    and boolean tensors, and for products of such tensors."""
    if not isinstance(node, fx.Node) or not isinstance(example(node), torch.Tensor):
        return False
    if example(node).dtype == torch.bool:
        return True
    source = same_elements(node)[-1]
    if called(source) == "mul" and len(source.args) == 2:
        chains = [same_elements(x) for x in source.args if isinstance(x, fx.Node)]
        written = any(writes_to(chain, since(chain[-1])) for chain in chains)
        return not written and all(map(_counts, source.args))
    return called(source) == "one_hot" or (source is not node and _counts(source))


def _most(source: fx.Node, dim: int, experts: int) -> int:
    """Return how many experts may be hit. For `one_hot(ids, E + 1)` it is the number from which `topk`
    chose the ids."""
    ids = named(source, ("one_hot",), ("input", "num_classes")).get("input")
    if ids is None or dim != example(source).dim() - 1:
        return experts
    return min(experts, chosen_from(ids) or experts)


def chosen_from(ids: fx.Node) -> int | None:
    """Return the number of experts that `topk`, `max` or `argmax` chose these ids from. None if something
    wrote to the ids since."""
    chain = same_elements(ids)
    chosen = named(chain[-1], ("getitem",), ("input", "item"))
    while isinstance(chosen.get("item"), tuple | slice):  # some of them
        chain += same_elements(chosen["input"])
        chosen = named(chain[-1], ("getitem",), ("input", "item"))
    among = named(chain[-1], ("argmax",), ("input", "dim", "keepdim"))
    if not among and chosen.get("item") == 1:
        chooser = chosen["input"]
        among = named(chooser, ("topk",), ("input", "k", "dim", "largest", "sorted"))
        among = among or named(chooser, ("max",), ("input", "dim", "keepdim"))
    dim = among.get("dim", -1 if "k" in among else None)
    if not isinstance(dim, int) or writes_to(chain, since(chain[-1])):
        return None
    size = example(among["input"]).shape[dim]
    return size if isinstance(size, int) else None
