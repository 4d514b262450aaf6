"""Captures the number of rows of each expert as Python numbers, and the ways in which programs use them.

`counts.tolist()` is captured for `rows.split(counts)`. So are slices `rows[start : start + n]` whose bounds
are sums of such numbers: they are the parts of `rows.split(counts)` if there are as many rows as were
counted. `counts.numpy()` is captured as that list if the program only takes one number after another. If such
numbers stay tensors (`for n in counts:`, `ends = counts.cumsum(0)`), the same numbers answer Python's
questions about them (`number_of`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    is_concrete_int,
    statically_known_true,
)

from ...meta.torch_internals import pytree
from ..graph.nodes import operand, several
from ..graph.traced_nodes import called, example, named, same_elements, since, writes_to
from . import api
from .bytecode import only_in_loops, only_indexes, only_iterates
from .empty_rows import SAYS_THE_SAME, number
from .hit_experts import chosen_from
from .rules import Counted, answers, new_list, replaces, scalar_outputs, session

if TYPE_CHECKING:
    from .api import (
        Handler,
        Instruction,
        ListVariable,
        Method,
        Proxy,
        SymNodeVariable,
        Tracer,
        TupleVariable,
        Variable,
    )


def as_numbers(method: Callable[..., ListVariable]) -> Method:
    """Capture `tolist()` of the row counts of experts, and of no other tensor."""

    def tolist(self: Variable, tx: Tracer, *args: object, **kwargs: object) -> Variable:
        node = self.as_proxy().node
        counts = _are_counts(node)
        with scalar_outputs(tx.output) if counts else nullcontext():
            numbers = method(self, tx, *args, **kwargs)
        ids = _ids_counted(node) if counts else None
        if ids is not None:
            known = cast("list[SymNodeVariable]", list(numbers.items))
            session(tx.output).counted.append(Counted(known, example(ids).numel(), ids))
        return numbers

    return tolist


def number_of(tx: Tracer, v: Variable) -> Variable | None:
    """Return the Python value of a tensor without dimensions: the row count of one or several experts
    together, or a test whether that is 0. None for other tensors."""
    if not isinstance(v, api.TensorVariable):
        return None
    x = example(v.as_proxy().node)
    return _number(tx, v.as_proxy().node) if isinstance(x, torch.Tensor) and x.dim() == 0 else None


def _number(tx: Tracer, node: fx.Node) -> Variable | None:
    known = session(tx.output).numbers
    if node in known or writes_to([node], since(node)):
        return known.get(node)
    found, operation = None, _OPERATIONS.get(called(node).strip("_"))
    element = named(node, ("getitem",), ("input", "item"))
    if type(element.get("item")) is int:
        every = elements(tx, element["input"])
        found = every[element["item"]] if every is not None else None
    elif operation is not None and len(node.args) == 2 and not node.kwargs:
        of = [v for a in node.args if (v := _constant_or_number(tx, a)) is not None]
        if len(of) == 2:
            found = api.BuiltinVariable(operation).call_function(tx, of, {})
    if found is not None:
        known[node] = found
    return found


def _constant_or_number(tx: Tracer, x: object) -> Variable | None:
    if isinstance(x, fx.Node):
        return _number(tx, x)
    return api.ConstantVariable.create(x) if type(x) is int else None


_OPERATIONS = {name: getattr(operator, name) for name in ("add", "sub", "eq", "ne", "gt", "ge", "lt", "le")}


def elements(tx: Tracer, node: fx.Node) -> list[Variable] | None:
    """Return the numbers in a tensor of one dimension: counts, their sums up to each expert, or these
    after a 0."""
    if example(node).dim() != 1 or writes_to([node], since(node)):
        return None
    name, known = called(node), session(tx.output).elements
    if node in known:
        return known[node]
    found: list[Variable] | None = None
    if _are_counts(node) and (ids := _ids_counted(node)) is not None:
        proxy = cast("Proxy", fx.Proxy(node, tx.output.current_tracer))
        with scalar_outputs(tx.output):
            found = numbers = [api.wrap_fx_proxy(tx, proxy[e].item()) for e in range(example(node).shape[0])]
        session(tx.output).counted.append(Counted(numbers, example(ids).numel(), ids))
    elif (
        name in ("to", "long", "int", "cpu", "clone", "contiguous") and not example(node).is_floating_point()
    ):
        before = node.args[0] if node.args else None
        found = elements(tx, before) if isinstance(before, fx.Node) else None
    elif name == "cumsum" and named(node, ("cumsum",), ("input", "dim")).get("dim") in (0, -1):
        parts = elements(tx, operand(node))
        if parts is not None:
            found = parts[:1]
            for part in parts[1:]:
                found.append(api.BuiltinVariable(operator.add).call_function(tx, [found[-1], part], {}))
    elif name in ("cat", "concat") and named(node, ("cat", "concat"), ("tensors", "dim")).get("dim", 0) in (
        0,
        -1,
    ):
        joined = [one for n in several(node, 0) if (one := elements(tx, n)) is not None]
        found = [n for one in joined for n in one] if len(joined) == len(several(node, 0)) else None
    elif name in _ZEROS and example(node).shape == (1,):
        found = [api.ConstantVariable.create(0)]
    if found is not None:
        known[node] = found
    return found


_INTEGERS = (torch.int32, torch.int64)


def asks_for_numbers(method: Handler) -> Handler:
    """Answer `if n == 0:` for a row count that is a tensor."""

    def jump(tx: Tracer, inst: Instruction) -> None:
        asked = number_of(tx, tx.stack[-1])
        if asked is not None:
            tx.stack[-1] = asked
        method(tx, inst)

    return jump


@answers
def as_number(tx: Tracer, v: Variable) -> Variable | None:
    """Answer `n.item()`, which slices call, too."""
    return number_of(tx, v)


@answers
def as_array(tx: Tracer, counts: Variable) -> Variable | None:
    """Capture `counts.numpy()` if the program only takes one number after another."""
    if not (only_iterates(tx) or only_in_loops(tx, subscripts=False)):
        return None
    node = counts.as_proxy().node
    known = _are_counts(node) and _ids_counted(node) is not None
    return counts.call_method(tx, "tolist", [], {}) if known else None


@answers
def as_index(tx: Tracer, rows: Variable) -> Variable | None:
    """Capture `token.tolist()` that only indexes tensors, `x[None, token_list]`, as in Mixtral's old remote
    code.

    A list with a data-dependent number of entries cannot be captured. Indexing with the tensor itself gives
    the same result.
    """
    x = example(rows.as_proxy().node)
    listed = isinstance(x, torch.Tensor) and x.dim() == 1 and x.dtype in _INTEGERS
    if not listed or not free_unbacked_symbols(x.shape[0]) or not only_indexes(tx):
        return None
    return rows.call_method(tx, "clone", [], {})


def _expert(tx: Tracer, rows: Variable, start: Variable, stop: Variable) -> tuple[Counted, int] | None:
    """Return the expert whose rows `rows[start:stop]` are, if they belong to one expert."""
    known = session(tx.output).counted
    if not known or not isinstance(rows, api.TensorVariable):
        return None
    at = [number(v) for v in (start, stop)]
    x = example(rows.as_proxy().node)
    if None in at or not isinstance(x, torch.Tensor) or not x.dim():
        return None
    for counts in known:
        expert = counts.between(*at)
        if expert is not None and statically_known_true(x.shape[0] == counts.total):
            return counts, expert
    return None


def _part(tx: Tracer, rows: Variable, start: Variable, stop: Variable) -> Variable | None:
    """Return `rows[start:stop]` if the rows belong to one expert."""
    found = _expert(tx, rows, start, stop)
    if found is None:
        return None
    counts, expert = found
    node = rows.as_proxy().node
    if node not in counts.parts:
        sizes = new_list(list(counts.numbers))
        counts.parts[node] = cast("TupleVariable", rows.call_method(tx, "split", [sizes], {})).items
    return counts.parts[node][expert]


def _ends(at: Variable) -> list[Variable]:
    """Return where a slice with steps of 1 starts and stops; nothing for any other index."""
    if not isinstance(at, api.SliceVariable):
        return []
    start, stop, step = at.items
    return [start, stop] if step.is_python_constant() and step.as_python_constant() in (None, 1) else []


@replaces(2)
def subscripts(tx: Tracer, rows: Variable, at: Variable) -> Variable | None:
    """Handle `rows[start:stop]` with the slice in one variable."""
    ends = _ends(at.realize()) if session(tx.output).counted else []
    return _part(tx, rows.realize(), *ends) if ends else None


@replaces(3)
def slices(tx: Tracer, *rows_and_ends: Variable) -> Variable | None:
    """Handle the same from Python 3.12 on, with the slice in two variables."""
    return _part(tx, *(v.realize() for v in rows_and_ends)) if session(tx.output).counted else None


def stores(method: Handler) -> Handler:
    """Handle `rows[start:stop] = y`, with the slice in one variable or, from Python 3.12 on, in two. After
    the rows of all experts are written, they are written once more, joined, which can be read in the
    graph."""

    def store(tx: Tracer, inst: Instruction) -> None:
        in_two = inst.opname == "STORE_SLICE"
        at: Sequence[Variable] = ()
        if session(tx.output).counted:
            y, rows, *at = (v.realize() for v in tx.stack[-4 if in_two else -3 :])
            at = at if in_two else _ends(at[0])
        method(tx, inst)
        found = _expert(tx, rows, *at) if len(at) == 2 else None
        if found is not None:
            _join_when_complete(tx, *found, rows, y)

    return store


def _join_when_complete(tx: Tracer, counts: Counted, expert: int, rows: Variable, y: Variable) -> None:
    node = rows.as_proxy().node
    write = next(iter(reversed(node.graph.nodes)))
    written = counts.written.setdefault(node, {})
    written[expert] = y, write
    if len(written) < len(counts.numbers) or not all(
        isinstance(y, api.TensorVariable) for y, _ in written.values()
    ):
        return
    shape, writes = example(node).shape, {write for _, write in written.values()}
    for e, (y, write) in written.items():
        x = example(y.as_proxy().node)
        like = x.dim() == len(shape) and x.dtype == example(node).dtype
        sizes = zip(x.shape, (counts.numbers[e].sym_num, *shape[1:]))
        if not like or not all(statically_known_true(m == n) for m, n in sizes):
            return
        if writes_to([y.as_proxy().node], since(write)):
            return
    first = next(n for n in node.graph.nodes if n in writes)
    if writes_to([node], (n for n in since(first) if n not in writes)):
        return
    parts = new_list([written[e][0] for e in range(len(written))])
    joined = api.TorchInGraphFunctionVariable(torch.cat).call_function(tx, [parts], {})
    written_again = rows.call_method(tx, "copy_", [joined], {}).as_proxy().node
    written_again.meta[SAYS_THE_SAME] = True


# --- which tensors are counts ---


def _source(node: fx.Node) -> list[fx.Node]:
    """Return `node`, and the nodes that its elements come from, on any device."""
    chain = same_elements(node)
    while called(chain[-1]) == "cpu":
        chain += same_elements(operand(chain[-1]))
    return chain


def _are_counts(node: fx.Node) -> bool:
    """Return whether a tensor looks like the row counts of experts. A later proof decides."""
    source = _source(node)[-1]
    counts = named(source, ("bincount",), ("input", "weights", "minlength"))
    binned = bool(counts)
    if counts:
        experts = chosen_from(counts["input"])
        if experts is not None and experts == counts.get("minlength"):
            torch._check(example(source).shape[0] == experts)  # no id is larger
    histogram = named(source, ("histc",), ("input", "bins", "min", "max"))
    if histogram:  # ids are cast to floats, and each id has a bin of its own
        binned = _ids_of(histogram) is not None
    shape = example(source).shape
    marked = named(source, ("sum",), ("input", "dim")).get("input")
    marks = called(same_elements(marked)[-1]) if marked is not None else ""
    return (binned or marks in (*_MARKS, *_ZEROS)) and len(shape) == 1 and is_concrete_int(shape[0])


_MARKS = ("one_hot", "scatter", "scatter_")
_ZEROS = ("zeros", "new_zeros", "zeros_like")


def _ids_counted(node: fx.Node) -> fx.Node | None:
    """Return the ids of all rows, if `node` certainly counts how many of them name each expert."""
    chain = _source(node)
    source, ids = chain[-1], None
    binned = named(source, ("bincount",), ("input", "weights", "minlength"))
    summed = named(source, ("sum",), ("input", "dim"))
    histogram = named(source, ("histc",), ("input", "bins", "min", "max"))
    if binned and binned.get("weights") is None:
        ids = binned["input"]
    elif histogram:
        ids = _ids_of(histogram)
    elif "dim" in summed:
        marks = same_elements(summed["input"])
        dims = pytree.tree_leaves(summed["dim"])
        rank = example(summed["input"]).dim()
        if {d % rank for d in dims} == set(range(rank - 1)):
            ids = named(marks[-1], ("one_hot",), ("input", "num_classes")).get("input")
            if ids is not None:
                chain += marks
            elif rank == 2:
                ids = _scattered(marks[-1])
    if ids is None or writes_to(chain, since(chain[-1])):
        return None
    return ids


def _ids_of(histogram: dict[str, Any]) -> fx.Node | None:
    """Return the ids that a histogram counts, if they were chosen from as many experts as it has bins."""
    ids = histogram["input"]
    while called(ids) in ("float", "to", "view", "reshape", "flatten") and isinstance(ids.args[0], fx.Node):
        ids = ids.args[0]
    bins = histogram.get("bins")
    whole = histogram.get("min") == 0 and type(bins) is int and histogram.get("max") in (bins - 1, bins)
    return ids if whole and not example(ids).is_floating_point() and chosen_from(ids) == bins else None


def _scattered(node: fx.Node) -> fx.Node | None:
    """Return ids [T, k] if node is zeros [T, E] with a 1 at each token's ids, which are distinct."""
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
    """Return whether the ids of a token, or some of them, were chosen by `topk` along the last dimension."""
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
