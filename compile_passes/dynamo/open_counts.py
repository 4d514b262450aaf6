"""Lets Dynamo capture loops over `bincount` without `minlength` as loops over all experts.

    counts = torch.bincount(ids).tolist()
    ends = torch.bincount(ids).cpu().numpy().cumsum(0)
    for e, end in enumerate(ends): ...  # rows[ends[e - 1]:end]

`bincount` without `minlength` has no number for experts after the largest id. If `topk` chose the ids from E
experts, such a list is traced with E numbers, the last of which may be 0. A loop over it then has more
rounds; each is proved to do nothing if its expert has no rows (`branches.py`, `empty_rows.py`). The program
must not use the list in any other way: not its length and, except for sums, no single numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from ..graph.traced_nodes import called, example, named
from . import api
from .branches import begins_again, is_kept, of_an_expert, watch
from .bytecode import only_in_loops
from .empty_rows import Way, number
from .hit_experts import chosen_from
from .row_counts import elements
from .rules import Numbers, OpenList, answers, is_watched, new_list, session

if TYPE_CHECKING:
    from .api import Handler, Instruction, Method, Tracer, Variable


@answers
def as_list(tx: Tracer, counts: Variable) -> Variable | None:
    """Capture `tolist()` of counts without `minlength`, and of their sums."""
    return _list(tx, counts)


@answers
def as_array(tx: Tracer, counts: Variable) -> Variable | None:
    """Capture `numpy()` of the same, if the array is only used in loops."""
    return _list(tx, counts, always=True)


def of_array(method: Method) -> Method:
    """Capture `array.cumsum(0)` that is only used in loops. For variables of NumPy's arrays."""

    def call_method(
        self: Variable, tx: Tracer, name: str, args: Sequence[Variable], kwargs: dict[str, Variable]
    ) -> Variable:
        if name == "cumsum" and not kwargs and [a.as_python_constant() for a in args] in ([], [0]):
            found = _list(tx, self, summed=True, always=True)
            if found is not None:
                return found
        return method(self, tx, name, args, kwargs)

    return call_method


def one_expert(method: Handler) -> Handler:
    """Trace one round of a loop over such a list for each of its numbers."""

    def for_iter(tx: Tracer, inst: Instruction) -> None:
        after = tx.instruction_pointer
        method(tx, inst)
        if not session(tx.output).open_lists or tx.instruction_pointer != after:
            return
        item = tx.stack[-1].realize()
        items = getattr(item, "items", None) or [item]
        for loops in session(tx.output).open_lists:
            numbers = loops.numbers
            at = [e for e, n in enumerate(numbers.shown) if any(n is i for i in items)]
            if at and loops.tx is tx:
                if is_watched(tx):
                    begins_again(tx, loops.begins)
                nothing = of_an_expert(tx.output, number(numbers.rows[at[0]]))
                watch(tx, Way(tx, nothing, after - 1), loops.begins, replaced=True)
                return

    return for_iter


def _list(tx: Tracer, v: Variable, summed: bool = False, always: bool = False) -> Variable | None:
    """Return a list of Python numbers for counts. always: also for counts with `minlength`, in loops."""
    here, node = tx.instructions[tx.instruction_pointer - 1], v.as_proxy().node
    source, sums = _source(node)
    ids = _open_ids(source)
    if ids is None and not (sums or summed):
        return None  # row_counts.py has those
    if is_watched(tx) or is_kept(tx, here):
        return None
    if (ids is not None or always) and not only_in_loops(tx, subscripts=summed or sums):
        return None
    numbers = _numbers(tx, source, ids, summed or sums)
    if numbers is None:
        return None
    if numbers.is_open:
        session(tx.output).open_lists.append(OpenList(tx, here, numbers))
    return new_list(list(numbers.shown))


_UNCHANGED = ("to", "long", "int", "cpu", "clone", "contiguous", "detach", "view_as")


def _source(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the counts that `node` holds in another form, and whether it holds their sums."""
    sums = False
    while node.args and isinstance(node.args[0], fx.Node) and isinstance(example(node), torch.Tensor):
        name, x = called(node), example(node)
        if name == "cumsum" and not sums and x.dim() == 1 and not x.is_floating_point():
            if named(node, ("cumsum",), ("input", "dim")).get("dim") not in (0, -1):
                break
            sums = True
        elif name not in _UNCHANGED or x.is_floating_point() or x.dtype == torch.bool:
            break
        node = node.args[0]
    return node, sums


def _open_ids(counts: fx.Node) -> fx.Node | None:
    """Return the ids that `bincount(ids)` counts, if they were chosen from a known number of experts."""
    binned = named(counts, ("bincount",), ("input", "weights", "minlength"))
    if not binned or binned.get("weights") is not None:
        return None
    experts, least = chosen_from(binned["input"]), binned.get("minlength", 0)
    is_open = experts is not None and type(least) is int and least < experts
    return binned["input"] if is_open else None


def _numbers(tx: Tracer, counts: fx.Node, ids: fx.Node | None, summed: bool) -> Numbers | None:
    if ids is not None:
        every = (fx.Proxy(ids, tx.output.current_tracer), None, chosen_from(ids))
        counts = (
            api.wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.bincount, every, {}))
            .as_proxy()
            .node
        )
    rows = elements(tx, counts)
    if rows is None:
        return None
    shown = list(rows)
    if summed:
        for e in range(1, len(rows)):
            shown[e] = api.BuiltinVariable(operator.add).call_function(tx, [shown[e - 1], rows[e]], {})
    return Numbers(rows, shown, ids is not None)
