"""How many rows each expert has, as Python's numbers, and what programs do with them.

`counts.tolist()` is captured for `rows.split(counts)`. So are slices `rows[start : start + n]` whose bounds
add such numbers up: they are the parts of `rows.split(counts)`, if there are as many rows as were counted.
`counts.numpy()`, of which a program only takes one number after the other, stands for the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import Unsupported
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    is_concrete_int,
    statically_known_true,
)

from .branches import wanted
from .bytecode import only_iterates
from .hits import chosen_from
from .traced import called, example, named, same_elements, since, writes_to
from .without_rows import Counted, counted, number


def as_numbers(method: Callable[..., Any]) -> Callable[..., Any]:
    """`tolist()` of how many rows each expert has is captured; any other is not.

    With CAPTURE Dynamo captures `torch.bincount(ids)`, and then fails in the conversion of a list whose
    length is unknown instead of breaking the graph: a model that compiles under Inductor would not under this
    backend.
    """

    def tolist(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        mode, node = tx.output.fake_mode, self.as_proxy().node
        counts = wanted(tx.output) and _are_counts(node)
        allowed = mode.allow_scalar_outputs
        mode.allow_scalar_outputs = allowed or counts
        try:
            numbers = method(self, tx, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            raise Unsupported("Tensor.tolist() of as many numbers as only the data knows") from None
        finally:
            mode.allow_scalar_outputs = allowed
        total = _total(node) if counts else None
        if total is not None:
            counted(tx.output).append(Counted(list(numbers.items), total))
        return numbers

    return tolist


def as_array(method: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and wanted(tx.output) and only_iterates(tx):
            node = self.as_proxy().node
            if _are_counts(node) and _total(node) is not None:
                return self.call_method(tx, "tolist", [], {})
        return method(self, tx, *args, **kwargs)

    return numpy


def _part(tx: Any, rows: Any, start: Any, stop: Any) -> Any:
    """`rows[start:stop]` of Dynamo's variables, if these are one expert's."""
    from torch._dynamo.variables import ListVariable, TensorVariable
    from torch._dynamo.variables.base import ValueMutationNew

    known = counted(tx.output)
    if not known or not isinstance(rows, TensorVariable):
        return None
    at = [number(v) for v in (start, stop)]
    node = rows.as_proxy().node
    if None in at or not isinstance(example(node), torch.Tensor) or not example(node).dim():
        return None
    for counts in known:
        expert = counts.between(*at)
        if expert is not None and statically_known_true(example(node).shape[0] == counts.total):
            if node not in counts.parts:
                sizes = ListVariable(list(counts.numbers), mutation_type=ValueMutationNew())
                counts.parts[node] = rows.call_method(tx, "split", [sizes], {}).items
            return counts.parts[node][expert]
    return None


def subscripts(method: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`rows[start:stop]`, a slice in one variable."""
    from torch._dynamo.variables.lists import SliceVariable

    def subscript(tx: Any, inst: Any) -> None:
        rows, at = (v.realize() for v in tx.stack[-2:]) if counted(tx.output) else (None, None)
        found = None
        if (
            isinstance(at, SliceVariable)
            and at.items[2].is_python_constant()
            and at.items[2].as_python_constant() in (None, 1)
        ):
            found = _part(tx, rows, *at.items[:2])
        if found is None:
            return method(tx, inst)
        tx.popn(2)
        tx.push(found)

    return subscript


def slices(method: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The same from Python 3.12 on, with a slice in two."""

    def slice_(tx: Any, inst: Any) -> None:
        found = _part(tx, *(v.realize() for v in tx.stack[-3:])) if counted(tx.output) else None
        if found is None:
            return method(tx, inst)
        tx.popn(3)
        tx.push(found)

    return slice_


# --- which tensors are counts ---


def _source(node: fx.Node) -> list[fx.Node]:
    """`node`, and what it has its elements from, on whatever device."""
    chain = same_elements(node)
    while called(chain[-1]) == "cpu":
        chain += same_elements(chain[-1].args[0])
    return chain


def _are_counts(node: fx.Node) -> bool:
    """Whether a tensor looks like the number of rows of each expert; whether it is one is proved later."""
    source = _source(node)[-1]
    binned = named(source, ("bincount",), ("input", "weights", "minlength"))
    if binned:
        experts = chosen_from(binned["input"])
        if experts is not None and experts == binned.get("minlength"):
            torch._check(example(source).shape[0] == experts)  # no id is larger
    shape = example(source).shape
    marked = named(source, ("sum",), ("input", "dim")).get("input")
    marks = called(same_elements(marked)[-1]) if marked is not None else ""
    return bool(binned or marks in (*_MARKS, *_ZEROS)) and len(shape) == 1 and is_concrete_int(shape[0])


_MARKS = ("one_hot", "scatter", "scatter_")
_ZEROS = ("zeros", "new_zeros", "zeros_like")


def _total(node: fx.Node) -> Any:
    """How many rows there are in all, if that is certain."""
    chain = _source(node)
    source, ids = chain[-1], None
    binned = named(source, ("bincount",), ("input", "weights", "minlength"))
    summed = named(source, ("sum",), ("input", "dim"))
    if binned and binned.get("weights") is None:
        ids = binned["input"]
    elif "dim" in summed:
        marks = same_elements(summed["input"])
        dims = torch.utils._pytree.tree_leaves(summed["dim"])
        rank = example(summed["input"]).dim()
        if {d % rank for d in dims} == set(range(rank - 1)):
            ids = named(marks[-1], ("one_hot",), ("input", "num_classes")).get("input")
            if ids is not None:
                chain += marks
            elif rank == 2:
                ids = _scattered(marks[-1])
    if ids is None or writes_to(chain, since(chain[-1])):
        return None
    return example(ids).numel()


def _scattered(node: fx.Node) -> fx.Node | None:
    """ids [T, k] if node is zeros [T, E] with a 1 put at each token's ids, which are distinct."""
    put = _put(node)
    zeros = put["input"] if put else node
    if called(zeros) not in _ZEROS:
        return None
    later = list(since(zeros))
    if not put or called(node).endswith("_"):  # in place
        writers = [n for n in later if writes_to([zeros], [n])]
        if len(writers) != 1:
            return None
        put = _put(writers[0])
    elif writes_to([zeros, node], later):
        return None
    one = put.get("value", put.get("src"))
    if put.get("dim") not in (1, -1) or type(one) not in (int, float) or one != 1:
        return None
    return put["index"] if _distinct(put["index"]) else None


def _put(node: fx.Node) -> dict[str, Any]:
    put = named(node, ("scatter",), ("input", "dim", "index", "src"))
    return put or named(node, ("scatter",), ("input", "dim", "index", "value"))


def _distinct(ids: fx.Node) -> bool:
    """Whether the ids of a token, or some of them, were chosen by `topk` along the last dimension."""
    node = ids
    while True:
        chain = same_elements(node)
        sizes = {example(n).shape[-1] for n in chain}
        whole = len(sizes) == 1 and all(map(is_concrete_int, sizes))
        if not whole or any(called(n) in ("permute", "transpose") for n in chain):
            return False
        taken = named(chain[-1], ("getitem",), ("input", "item"))
        at = taken.get("item")
        if not all(isinstance(i, slice) for i in (at if isinstance(at, tuple) else (at,))):
            break
        node = taken["input"]
    topk = named(taken.get("input"), ("topk",), _TOPK)
    rank = example(chain[-1]).dim()
    return bool(topk) and topk.get("dim", -1) in (-1, rank - 1) and chosen_from(ids) is not None


_TOPK = ("input", "k", "dim", "largest", "sorted")
