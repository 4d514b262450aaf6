"""Tells the probabilities of an attention from a router's scores.

Both come from a softmax. A router's runs over the experts, an attention's over the rows that it adds up. A
topk may have cut the probabilities after the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..graph.nodes import BY_SIZE, aten, integer, is_op, is_pointwise, is_tensor, item, operand, shape, value
from ..index.terms import Axis, Composite, Ref, Term, free_axes

SOFTMAX = (aten._softmax, aten.softmax)
_KEEP = (aten.scatter, aten.gather, aten.slice, aten.sum, aten._to_copy, aten.clone)
_FAR = 24


def attends(weight: Term, e: set[Axis], summed: set[Axis] | None) -> bool:
    """Return whether weights are a softmax over what else is summed, not over the experts: attention, whose
    heads are added up. If `summed` is None, over anything but the experts."""
    found = False
    for ref in _values(weight):
        dims = _softmax_dims(ref.node)
        along = {axis for d in dims for axis in free_axes(ref.index[d])}
        if not dims or along & e:
            return False
        found = found or summed is None or bool(along & summed)
    return found


def _values(term: Term) -> Iterator[Ref]:
    """Yield the elements that a term is computed from. A computed part with a node counts as one element."""
    own = term if isinstance(term, Ref) else term.ref if isinstance(term, Composite) else None
    if own is not None:
        yield own
    else:
        for part in term.children():
            yield from _values(part)


def _softmax_dims(node: fx.Node) -> set[int]:
    """Return the dimensions along which a softmax made all values of a tensor, before a mask or a topk that
    keeps the largest of them. Empty if anything else made any of them."""
    dims: set[int] = set()
    seen, todo = {node}, [node]
    while todo:
        n = todo.pop()
        if is_op(n, *SOFTMAX):
            dims.add(integer(n, 1) % len(shape(n)))
            continue
        of = operand(n) if item(n) is not None else n
        if not (is_pointwise(of) or is_op(of, *_KEEP) or (is_op(of, aten.topk) and item(n) == (of, 0))):
            return set()
        made_of = [i for i in of.all_input_nodes if is_tensor(i) and value(i).dtype.is_floating_point]
        made_of = [i for i in made_of if not is_op(i, *BY_SIZE)]
        if not made_of or any(len(shape(i)) != len(shape(node)) for i in made_of) or len(seen) > _FAR:
            return set()
        todo += [i for i in made_of if i not in seen]
        seen.update(made_of)
    return dims
