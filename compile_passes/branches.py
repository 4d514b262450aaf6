"""`if token.numel() == 0: continue` in a loop over experts, captured as if the branch were not there.

Dynamo breaks its graph at a branch on a size that only the data knows; in a loop that leaves the whole
function to Python. A branch that only skips what does nothing for empty rows need not be one: the graph of
the way that does the work holds for both. So a condition that asks if a number of rows is 0 (a size that only
the data knows, or how much of a mask is set) is answered for that way, and once Dynamo has traced it up to
where both meet, `without_rows` has to prove that it does nothing without rows. Where that fails Dynamo starts
over, and breaks the graph at that branch as it always did.

`for e in hit.nonzero(): e = e[0]; ...`, over the experts that a mask has rows for, is such a loop, too: over
all experts, skipping those without rows. It is traced as that, and each round proved to do nothing without.
So is `for t in hit.nonzero(): mask[t] ... f"expert_{t[0]}"`, where t stays a tensor of one element.
"""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.bytecode_analysis import HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.exc import RestartAnalysis, UnspecializeRestartAnalysis, Unsupported
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols

from . import changes
from .asserts import into_the_graph
from .bytecode import asks_for
from .without_rows import (
    Nothing,
    Unproved,
    Way,
    called,
    example,
    has_all_rows,
    in_short,
    live,
    same_elements,
    since,
    writes_to,
)

SEEN_THROUGH, KEPT = "fp4_branches_seen_through", "fp4_branches_kept"
"""Of `torch._dynamo.utils.counters`: places (file:line), and "file:line stays a branch: why" (or a loop)
above what would help."""


Handler = Callable[[Any, Any], None]


def see_through_branches() -> None:
    """For graphs of backends with `sees_through_branches`. The one hook in Dynamo is its table of opcodes."""
    jumps = [name for name in dis.opmap if re.fullmatch(r"POP_JUMP_.*IF_(TRUE|FALSE)", name)]
    hook_opcodes(
        dict.fromkeys(jumps, _answering_first) | {"GET_ITER": _over_experts, "FOR_ITER": _one_expert}
    )


def hook_opcodes(wrappers: dict[str, Callable[[Handler], Handler]]) -> None:
    """Wraps Dynamo's handlers of these opcodes, once."""
    from torch._dynamo import symbolic_convert

    classes = [symbolic_convert.InstructionTranslatorBase]
    for cls in classes:
        classes += cls.__subclasses__()
        for name, wrapper in wrappers.items():
            method = cls.dispatch_table[dis.opmap[name]] if name in dis.opmap else None
            if method is not None and not hasattr(method, "_fp4"):
                cls.dispatch_table[dis.opmap[name]] = wrapped = functools.wraps(method)(wrapper(method))
                wrapped._fp4 = True  # type: ignore[attr-defined]


def _answering_first(method: Handler) -> Handler:
    from torch._dynamo.variables import ConstantVariable

    def jump(tx: Any, inst: Any) -> None:
        if _GROWN in vars(tx.output):
            _asks_whether_there_are_rows(tx, inst)
        if wanted(tx.output) and into_the_graph(tx, inst):
            return
        answer = _take_the_way_that_works(tx, inst) if wanted(tx.output) else None
        if answer is not None:
            tx.stack[-1] = ConstantVariable.create(answer)
        try:
            method(tx, inst)
        except GuardOnDataDependentSymNode:  # from `if len(rows):`, where `len(rows) > 0` breaks the graph
            raise Unsupported("a branch on a size that only the data knows") from None

    return jump


def _over_experts(method: Handler) -> Handler:
    from torch._dynamo.variables import ConstantVariable, ListVariable
    from torch._dynamo.variables.base import ValueMutationNew

    def get_iter(tx: Any, inst: Any) -> None:
        number = _where_the_number_is_stored(tx) if wanted(tx.output) else None
        mask = _mask_of_hits(tx, inst) if number is not None else None
        tensors = number == tx.instruction_pointer + 1
        if mask is not None and tensors and example(tx.stack[-1].as_proxy().node).dim() != 2:
            mask = None  # they are tensors of no dimension
        if mask is not None:
            experts: list[Any] = [ConstantVariable.create(e) for e in range(_rounds(mask))]
            if tensors:
                experts = [_one_element()([e], mutation_type=ValueMutationNew()) for e in experts]
            tx.stack[-1] = ListVariable(experts, mutation_type=ValueMutationNew())
        method(tx, inst)
        if mask is not None:
            vars(tx.stack[-1])[_HITS] = mask, inst, number

    return get_iter


_HITS = "_fp4_hits"
"""On an iterator of Dynamo's: the mask, the instruction that began the loop, and where e is stored."""


def _one_expert(method: Handler) -> Handler:
    def for_iter(tx: Any, inst: Any) -> None:
        hits, after = vars(tx.stack[-1]).get(_HITS), tx.instruction_pointer
        method(tx, inst)
        if hits is not None and tx.instruction_pointer == after:
            mask, loop, number = hits
            expert = tx.stack[-1].as_python_constant()
            row = (mask, expert[0] if isinstance(expert, list) else expert)
            way = Way(tx, Nothing(rows={row}), after - 1)
            tx.instruction_pointer = number
            _watch(tx, way, loop, replaced=True)

    return for_iter


@functools.cache
def _one_element() -> Any:
    """A tensor of one known integer, for `x[t]` and `t[0]`: a list that indexes a tensor as a slice would."""
    from torch._dynamo.variables import ListVariable

    class OneElement(ListVariable):
        def as_proxy(self) -> slice:
            (e,) = self.as_python_constant()
            return slice(e, e + 1)

    return OneElement


def _where_the_number_is_stored(tx: Any) -> int | None:
    """In `for t in hit: e = t[0]` (or `t.item()`, `int(t.item())`, `int(t)`), where t is not read again: the
    instruction that stores e. A round over all experts begins there, with e on the stack. If all that is
    read of t is `t[0]`, and `x[t]` of tensors: the instruction that stores t."""
    start = tx.instruction_pointer
    head = [
        (i.opname, i.argval, at)
        for at, i in enumerate(tx.instructions[start : start + 10], start)
        if i.opname != "PRECALL"
    ]
    code = [(name.replace("LOAD_ATTR", "LOAD_METHOD"), value) for name, value, _ in head]
    if code[0][0] != "FOR_ITER" or code[1][0] != "STORE_FAST":
        return None
    hit = code[1][1]
    for first, rest in _NUMBER_OF:
        n = 2 + len(first) + 1 + len(rest)
        if code[2:n] == [*first, ("LOAD_FAST", hit), *rest] and code[n][0] == "STORE_FAST":
            shadowed = first and any("int" in names for names in (tx.f_globals, tx.symbolic_globals))
            number = head[n][2]
            again = hit != code[n][1] and hit in live(tx, number + 1, swallowing=True)
            return None if shadowed or again else number
    return start + 1 if _only_indexes(tx, start) else None


def _only_indexes(tx: Any, loop: int) -> bool:
    """Whether t of `for t in hit:` is read only as `t[0]`, or `x[t]` of a tensor x that no one assigns to."""
    code = [i for i in tx.instructions[loop:] if i.opname != "PRECALL"]
    hit, code = code[1].argval, code[2:]

    def uses(name: str, i: Any) -> bool:
        return i.opcode in HASLOCAL and name in (i.argval if isinstance(i.argval, tuple) else (i.argval,))

    def is_tensor(i: Any) -> bool:
        assigned = any(uses(i.argval, j) and j.opname != "LOAD_FAST" for j in code)
        known = tx.symbolic_locals.get(i.argval) if i.opname == "LOAD_FAST" else None
        return known is not None and not assigned and isinstance(known.realize(), TensorVariable)

    from torch._dynamo.variables.tensor import TensorVariable

    for at, i in enumerate(code):
        if uses(hit, i):
            then = [(j.opname, j.argval) for j in code[at + 1 : at + 3]]
            first, index = then == _NUMBER_OF[0][1], then[0][0] == "BINARY_SUBSCR"
            if i.opname != "LOAD_FAST" or not (first or (index and at and is_tensor(code[at - 1]))):
                return False
    return True


_INT, _ITEM = ("LOAD_GLOBAL", "int"), [("LOAD_METHOD", "item"), ("CALL", 0)]
_NUMBER_OF: list[tuple[list[Any], list[Any]]] = [
    ([], [("LOAD_CONST", 0), ("BINARY_SUBSCR", None)]), ([], _ITEM),
    ([_INT], [*_ITEM, ("CALL", 1)]), ([_INT], [("CALL", 1)]),
]  # fmt: skip


def _take_the_way_that_works(tx: Any, branch: Any) -> bool | None:
    """What the condition on the stack is where there are rows, if the branch may turn out to be none."""
    asked = _rows_asked_for(tx.stack[-1])
    around = vars(tx).get("step")
    if asked is None or (around and not around.replaced) or (tx.f_code, branch.offset) in _kept(tx):
        return None
    nothing, empty = asked
    following = tx.instructions[tx.instruction_pointer]
    skip = branch.target if ("IF_TRUE" in branch.opname) is empty else following
    _watch(tx, Way(tx, nothing, _first_work(tx.instructions, tx.indexof, skip)), branch)
    return not empty


_GROWN = "_fp4_grown"
"""On Dynamo's output: lists that are shorter where experts without rows are skipped, and those branches."""


def _asks_whether_there_are_rows(tx: Any, jump: Any) -> None:
    """`if len(outputs):`, of a list with something for each expert that has rows: some expert has any, if the
    list is of all experts and there are rows."""
    asked = asks_for(tx, jump)
    for v, branch, place in vars(tx.output)[_GROWN]:
        if asked is not None and tx.symbolic_locals.get(asked) is v and not has_all_rows(tx.output, v):
            _kept(tx).add(branch)
            counters[SEEN_THROUGH].pop(place, None)
            _tell_kept(place, "a branch", f"`{asked}` may be empty", changes.COUNT_TOKENS)
            raise UnspecializeRestartAnalysis(restart_reason=f"fp4: {place} is a branch")


def _tell_kept(place: str, what: str, why: str, change: str) -> None:
    counters[KEPT][f"{place} stays {what}: {why}\n{change}"] += 1


def _kept(tx: Any) -> set[tuple[Any, int]]:
    """What stays as it is, in all attempts to trace a function."""
    return vars(tx.speculation_log).setdefault("_fp4_kept", set())


def _watch(tx: Any, way: Way, branch: Any, replaced: bool = False) -> None:
    """Has `way` proved when it ends. replaced: it is a round of a loop over all experts."""
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    around, advance_in = vars(tx).get("step"), tx.step

    def advance() -> bool:
        try:
            return advance_in()
        except RestartAnalysis:
            raise
        except Exception as error:
            if not replaced:
                raise
            raise Unproved(f"over all experts it fails: {in_short(error)}", changes.ALL_RUN) from error

    def step() -> bool:
        """Instead of tx.step, until both ways meet."""
        try:
            if tx.instruction_pointer == way.join:
                if tx.step is not step:
                    raise Unproved("a branch in it ends after it", changes.ALL_RUN)
                del tx.step
                if around is not None:
                    tx.step = around
                way.prove()
                for v in way.grown:
                    known = vars(tx.output).setdefault(_GROWN, [])
                    known.append((v, (tx.f_code, branch.offset), place))
                counters[SEEN_THROUGH][place] += 1
            elif not advance():
                raise Unproved(
                    "it leaves the function, or the graph breaks, before both ways meet", changes.ALL_RUN
                )
            return True
        except Unproved as why:
            _kept(tx).add((tx.f_code, branch.offset))
            counters[SEEN_THROUGH].pop(place, None)
            _tell_kept(place, "a loop" if replaced else "a branch", str(why), why.change)
            # The one restart that also forgets where Dynamo tried to break the graph: the way is another now.
            raise UnspecializeRestartAnalysis(restart_reason=f"fp4: {place} is a branch") from None

    step.replaced = replaced  # type: ignore[attr-defined]
    tx.step = step


def wanted(output: Any) -> bool:
    backend = output.compiler_fn
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        while hasattr(backend, name):
            backend = getattr(backend, name)
    return getattr(backend, "sees_through_branches", False)


def _rows_asked_for(condition: Any) -> tuple[Nothing, bool] | None:
    """What is empty if there are no rows, and what `condition` is then; it is the opposite for every other
    number of rows. None if it asks for anything else, or if its answer is known."""
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    nothing = Nothing()
    if isinstance(condition, SymNodeVariable):
        expr = condition.sym_num.node.expr
        if len(expr.free_symbols) != 1 or not free_unbacked_symbols(condition.sym_num):
            return None
        nothing.sizes.update(expr.free_symbols)
        if not isinstance(condition.sym_num, torch.SymBool):
            expr = sympy.Ne(expr, 0)
    elif isinstance(condition, TensorVariable):
        found = _count_of_a_mask(condition.as_proxy().node)
        if found is None:
            return None
        mask, expr = found
        nothing.masks.add(mask)
    else:
        return None
    (symbol,) = expr.free_symbols
    some = expr.subs(symbol, sympy.Symbol("some", integer=True, positive=True))
    none = expr.subs(symbol, 0)
    if some not in (sympy.true, sympy.false) or none != sympy.Not(some):
        return None
    return nothing, bool(none)


_COMPARISONS = {
    "eq": sympy.Eq, "ne": sympy.Ne, "gt": sympy.Gt, "ge": sympy.Ge, "lt": sympy.Lt, "le": sympy.Le,
}  # fmt: skip


def _count_of_a_mask(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """The mask and the condition for `mask.any()`, `mask.sum() == 0` and their like. Nothing may have been
    traced since: the mask is still what it was."""
    last = next(iter(reversed(node.graph.nodes)))
    count = sympy.Symbol("count", integer=True)
    expr = sympy.Ne(count, 0)
    compared = _COMPARISONS.get(called(node).strip("_"))
    if compared is not None and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        expr = compared(count, node.args[1])
        last = last.prev if last is node else last
        node = node.args[0]
    if (
        last is not node
        or called(node) not in ("any", "sum", "count_nonzero")
        or len(node.args) != 1
        or node.kwargs
    ):
        return None
    (mask,) = node.args
    return (mask, expr) if isinstance(mask, fx.Node) and example(mask).dtype == torch.bool else None


def _mask_of_hits(tx: Any, loop: Any) -> fx.Node | None:
    """The mask [E, ...] if a loop is over `(mask.sum(all but the first) > 0).nonzero()`, one column."""
    from torch._dynamo.variables.tensor import TensorVariable

    if (
        not isinstance(tx.stack[-1], TensorVariable)
        or "step" in vars(tx)
        or (tx.f_code, loop.offset) in _kept(tx)
    ):
        return None
    hits = hit = tx.stack[-1].as_proxy().node
    squeezed = named(hits, ("squeeze",), ("input", "dim"))
    if squeezed.get("dim") in (1, -1):
        hit = squeezed["input"]
    asked = named(hit, ("nonzero",), ("input", "as_tuple"))
    some = asked.get("input") if not asked.get("as_tuple") else None
    compared = named(some, ("gt", "greater"), ("input", "other"))
    total = compared.get("input") if compared.get("other") == 0 else None
    summed = named(total, ("sum",), ("input", "dim", "keepdim"))
    mask, dims = summed.get("input"), summed.get("dim")
    if mask is None or not isinstance(dims, tuple | list) or example(hit).shape[1:] != (1,):
        return None
    x, chain = example(mask), same_elements(mask)
    if x.dim() < 2 or {d % x.dim() for d in dims} != set(range(1, x.dim())):
        return None
    if not isinstance(x.shape[0], int) or _rounds(mask) > _MOST_ROUNDS:
        return None
    if not _counts(mask) or writes_to([hits, hit, some, total, *chain], since(chain[-1])):
        return None
    return mask


def _counts(node: Any) -> bool:
    """Whether no element is negative, so that a sum of 0 says all are 0: one-hot, boolean, or products."""
    x = example(node) if isinstance(node, fx.Node) else None
    if not isinstance(x, torch.Tensor):
        return False
    if x.dtype == torch.bool:
        return True
    source = same_elements(node)[-1]
    if called(source) == "mul" and len(source.args) == 2:
        chains = [same_elements(x) for x in source.args if isinstance(x, fx.Node)]
        written = any(writes_to(chain, since(chain[-1])) for chain in chains)
        return not written and all(map(_counts, source.args))
    return called(source) == "one_hot"


_MOST_ROUNDS = 1024
"""More than any model has experts. Each is traced, which takes Dynamo up to 0.1 s."""


def named(node: Any, functions: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call of one of `functions`; none if it is of another, or has others than `names`."""
    if (
        not isinstance(node, fx.Node)
        or called(node).strip("_") not in functions
        or len(node.args) > len(names)
    ):
        return {}
    named = dict(zip(names, node.args)) | node.kwargs
    return named if named.keys() <= set(names) else {}


def _rounds(mask: fx.Node) -> int:
    """How many rows of a mask may be set: of `one_hot(ids, E + 1)` those that `topk` chose the ids from."""
    rows, chain = example(mask).shape[0], same_elements(mask)
    hot = chain[-1]
    ids = named(hot, ("one_hot",), ("input", "num_classes")).get("input")
    if ids is None or not _is_first(chain, example(hot).dim() - 1):
        return rows
    return min(rows, chosen_from(ids) or rows)


def chosen_from(ids: fx.Node) -> int | None:
    """The number of experts that `topk`, `max` or `argmax` chose these ids from, which no one wrote to."""
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


def _is_first(chain: Sequence[fx.Node], dim: int) -> bool:
    """Whether dimension `dim` of a chain's last node is the first one of its first node."""
    for node in reversed(chain[:-1]):
        dims = torch.utils._pytree.tree_leaves(node.args[1:])
        order = list(range(example(node).dim()))
        if called(node) == "permute" and dims:
            order = [order[d] for d in dims]
        elif called(node) == "transpose" and len(dims) == 2:
            i, j = dims
            order[i], order[j] = order[j], order[i]
        elif called(node) not in ("to", "long", "int", "contiguous"):
            return False
        dim = order.index(dim)
    return dim == 0


def _first_work(instructions: Sequence[Any], indexof: dict[Any, int], at: Any) -> int:
    while at.opcode in JUMP_OPCODES & TERMINAL_OPCODES or at.opname == "NOP":
        at = at.target if at.opcode in JUMP_OPCODES else instructions[indexof[at] + 1]
    return indexof[at]
