"""Index notation: describes one element of a tensor as a term over named axes.

`x[token]` with `token = nonzero(ids == 3)[0]`, and `x` gathered, viewed or permuted by other means, all
become the same `Ref(x, (t, h))`. Programs that are written differently but compute the same have equal terms.
Terms are interned: equal terms are one object.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard, TypeVar

from torch import fx

from ..graph.nodes import aten
from ..naming import called
from ..refusal import words

Size = Any
"""A dimension's size: int or SymInt."""


class Term:
    """An interned expression: compare with `is`."""

    __slots__ = ("_fields",)
    _fields: tuple[Any, ...]
    _names: ClassVar[tuple[str, ...]] = ()
    """The fields as attributes, in order."""

    @classmethod
    def _make(cls, *fields: Any) -> Any:
        key = (cls, *fields)
        table = _interned.table
        found = table.get(key)
        if found is None:
            found = object.__new__(cls)
            found._fields = fields
            for name, field in zip(cls._names, fields):
                setattr(found, name, field)
            table[key] = found
        return found

    def children(self) -> Iterator[Term]:
        for field in self._fields:
            if isinstance(field, Term):
                yield field
            elif isinstance(field, tuple):
                yield from (f for f in field if isinstance(f, Term))


_interned = threading.local()


@contextlib.contextmanager
def interning() -> Iterator[None]:
    """Terms exist only inside this context. They hold graph nodes, and must not live longer than one
    graph's analysis."""
    outer = getattr(_interned, "table", None)
    _interned.table = {}
    try:
        yield
    finally:
        _interned.table = outer


class Axis(Term):
    """A coordinate that runs from 0 to size - 1. As a term it is its own value."""

    __slots__ = ("name", "size")
    _count = itertools.count()

    def __init__(self, size: Size, name: str = "") -> None:
        self.size = size
        self.name = name or f"a{next(Axis._count)}"
        self._fields = ()

    def __repr__(self) -> str:
        return self.name


class ChosenRows(Axis):
    """An axis over the rows that a mask selects or a sort reorders. Row r stands for one combination of
    values of the axes `bound`.

    Tensors with this axis have terms over `bound`, whose axes occur nowhere else. If `mask` is None, every
    combination of values occurs once. `key` (sorts only) is the term by which the rows are in ascending
    order.
    """

    __slots__ = ("bound", "key", "mask")

    def __init__(
        self, size: Size, bound: tuple[Axis, ...], mask: Term | None, key: Term | None = None
    ) -> None:
        super().__init__(size)
        self.bound, self.mask, self.key = bound, mask, key


def some_chosen(axes: Iterable[Axis]) -> bool:
    """Return whether rows that a mask or a sort selected are among these axes."""
    return any(isinstance(a, ChosenRows) for a in axes)


class Const(Term):
    """A Python number. None stands for uninitialised memory."""

    __slots__ = _names = ("type", "value")
    type: str
    value: Any

    def __new__(cls, value: float | int | None) -> Const:
        return cls._make(type(value).__name__, value)

    def __repr__(self) -> str:
        return str(self.value)


class Mix(Term):
    """A coordinate made of several coordinates in row-major order. `sizes` are the sizes of the parts."""

    __slots__ = ("parts", "sizes")
    _names = ("parts",)
    parts: tuple[Term, ...]
    sizes: tuple[Size, ...]

    def __new__(cls, parts: Iterable[Term], sizes: Iterable[Size]) -> Any:
        parts, sizes = tuple(parts), tuple(sizes)
        if len(parts) == 1:
            return parts[0]
        if (only := cls._affine(parts, sizes)) is not None:
            return only
        self = cls._make(parts, tuple(map(str, sizes)))
        self.sizes = sizes
        return self

    @staticmethod
    def _affine(parts: tuple[Term, ...], sizes: tuple[Size, ...]) -> Term | None:
        """Return an affine form if at most one part is not fixed: a number, or a slice of the whole."""
        free = [i for i, p in enumerate(parts) if not isinstance(p, Const)]
        if len(free) > 1:
            return None
        start, stride, step = 0, 1, 1
        for i in reversed(range(len(parts))):
            if i in free:
                step = stride
            else:
                start += parts[i].value * stride  # type: ignore[attr-defined]
            if i and not isinstance(sizes[i], int):
                return None
            stride *= sizes[i] if i else 1
        return Affine(parts[free[0]], start, step) if free else Const(start)

    def __repr__(self) -> str:
        return f"({' '.join(map(repr, self.parts))})"


class Affine(Term):
    """start + step * base: a coordinate inside a slice."""

    __slots__ = _names = ("base", "start", "step")
    base: Term
    start: int
    step: int

    def __new__(cls, base: Term, start: int, step: int) -> Any:
        if (start, step) == (0, 1):
            return base
        if isinstance(base, Const):
            return Const(start + step * base.value)
        if isinstance(base, Affine):
            return cls(base.base, start + step * base.start, step * base.step)
        return cls._make(base, start, step)

    def __repr__(self) -> str:
        return f"{self.start}+{self.step}{self.base!r}"


def affine(coordinate: Term) -> tuple[Term, int, int]:
    """Return (base, start, step) of a coordinate, which is start + step * base."""
    if isinstance(coordinate, Affine):
        return coordinate.base, coordinate.start, coordinate.step
    return coordinate, 0, 1


def parts_of(coordinate: Term) -> tuple[Term, ...]:
    """Return the coordinates that a coordinate is made of, in row-major order."""
    return coordinate.parts if isinstance(coordinate, Mix) else (coordinate,)


class Ref(Term):
    """An element of the tensor that a graph node computes."""

    __slots__ = _names = ("node", "index")
    node: fx.Node
    index: tuple[Term, ...]

    def __new__(cls, node: fx.Node, index: Iterable[Term]) -> Ref:
        return cls._make(node, tuple(index))

    def __repr__(self) -> str:
        return f"{self.node.name}[{', '.join(map(repr, self.index))}]"


class Composite(Term):
    """A term that a node of the graph may compute, too. `ref` is the element of that node."""

    __slots__ = ()
    ref: Ref | None


class Apply(Composite):
    """A pointwise operator. `op` is the overload. `args` are its arguments: terms, or constants of the
    call."""

    __slots__ = _names = ("op", "args", "named", "ref")
    op: Any
    args: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def __new__(
        cls, op: Any, args: Iterable[Any], kwargs: tuple[Any, ...] = (), ref: Ref | None = None
    ) -> Any:
        return cls._make(op, tuple(args), kwargs, ref)

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.named)

    def __repr__(self) -> str:
        return f"{getattr(self.op, 'overloadpacket', self.op).__name__}({', '.join(map(repr, self.args))})"


def is_eq(term: Any) -> TypeGuard[Apply]:
    return isinstance(term, Apply) and term.op is aten.eq


class Mul(Composite):
    __slots__ = _names = ("args", "ref")
    args: tuple[Term, Term]

    def __new__(cls, a: Term, b: Term, ref: Ref | None = None) -> Mul:
        return cls._make((a, b), ref)

    def __repr__(self) -> str:
        return f"{self.args[0]!r}*{self.args[1]!r}"


class Add(Composite):
    __slots__ = _names = ("args", "ref")
    args: tuple[Term, ...]

    def __new__(cls, args: Iterable[Term], ref: Ref | None = None) -> Any:
        return cls._make(tuple(args), ref)

    def __repr__(self) -> str:
        return f"({' + '.join(map(repr, self.args))})"


class OverAxes(Composite):
    """A reduction of `body` over `axes`. The axes are bound: they appear nowhere else.

    With no axes this is `body`.
    """

    __slots__ = _names = ("axes", "body", "ref")
    axes: tuple[Axis, ...]
    body: Term
    word = ""

    def __new__(cls, axes: Iterable[Axis], body: Term, ref: Ref | None = None) -> Any:
        axes = tuple(axes)
        return body if not axes else cls._make(axes, body, ref)

    def __repr__(self) -> str:
        return f"{self.word}{self.axes!r}[{self.body!r}]"


class Sum(OverAxes):
    __slots__ = ()
    word = "sum"


class Mean(OverAxes):
    __slots__ = ()
    word = "mean"


class AnyOf(OverAxes):
    """The indicator that the body is true for at least one value of the axes."""

    __slots__ = ()
    word = "any"


class NoneOf(Term):
    """1 where none of these masks is set, else 0. It marks rows that nothing overwrites."""

    __slots__ = _names = ("masks",)
    masks: tuple[Term, ...]

    def __new__(cls, masks: Iterable[Term]) -> NoneOf:
        return cls._make(tuple(masks))

    def __repr__(self) -> str:
        return f"none of {self.masks!r}"


class Choose(Composite):
    """options[index], an element of stacked tensors."""

    __slots__ = _names = ("index", "options", "ref")
    index: Term
    options: tuple[Term, ...]

    def __new__(cls, index: Term, options: Iterable[Term], ref: Ref | None = None) -> Any:
        options = tuple(options)
        return options[index.value] if isinstance(index, Const) else cls._make(index, options, ref)


Replaced = TypeVar("Replaced", bound=Term)


def substitute(term: Any, mapping: Mapping[Replaced, Term]) -> Any:
    """Return `term` with axes replaced, all at once."""
    if not mapping or not isinstance(term, Term):
        return term
    return _transformed(term, dict(mapping.items()), None, with_refs=True)


def transform(term: Term, at: Callable[[Term], Term | None], with_refs: bool = True) -> Term:
    """Replace parts of `term` by `at(part)`, from the outside in. If `at(part)` is None, the parts of that
    part are tried.

    Without `with_refs`, rebuilt terms forget which node computes them.
    """
    return _transformed(term, {}, at, with_refs)


def _transformed(
    term: Term, done: dict[Term, Term], at: Callable[[Term], Term | None] | None, with_refs: bool
) -> Term:
    """`done` maps parts to their replacements, as far as they are known.

    A term may be as deep as the graph is long, so a list holds the unfinished parts and not Python's stack.
    """
    begun = [term]
    while begun:
        t = begun[-1]
        if t not in done:
            new = t if isinstance(t, (Axis, Const)) else at(t) if at is not None else None
            if new is None:
                own = None if with_refs or not isinstance(t, Composite) else t.ref
                chosen, parts = None, t.children()
                if isinstance(t, Choose):  # a constant index chooses one option; the others are not needed
                    index = done.get(t.index)
                    chosen = t.options[index.value] if isinstance(index, Const) else None
                    if index is None or chosen is not None:
                        parts = iter([t.index if chosen is None else chosen])
                missing = [c for c in parts if c not in done and c is not own]
                if missing:
                    begun += missing
                    continue
                new = _rebuilt(t, done.__getitem__, with_refs) if chosen is None else done[chosen]
            done[t] = new
        begun.pop()
    return done[term]


def _rebuilt(t: Term, go: Callable[[Any], Any], with_refs: bool) -> Term:
    """Return `t` with `go` applied to its children."""

    def ref(r: Ref | None) -> Any:
        return None if r is None or not with_refs else go(r)

    if isinstance(t, (Axis, Const)):
        return t
    if isinstance(t, Ref):
        return Ref(t.node, map(go, t.index))
    if isinstance(t, Mix):
        return Mix(map(go, t.parts), t.sizes)
    if isinstance(t, NoneOf):
        return NoneOf(map(go, t.masks))
    if isinstance(t, Affine):
        return Affine(go(t.base), t.start, t.step)
    if isinstance(t, Apply):
        return Apply(t.op, [go(a) if isinstance(a, Term) else a for a in t.args], t.named, ref(t.ref))
    if isinstance(t, Mul):
        return Mul(go(t.args[0]), go(t.args[1]), ref(t.ref))
    if isinstance(t, Add):
        return Add(map(go, t.args), ref(t.ref))
    if isinstance(t, OverAxes):
        return type(t)(t.axes, go(t.body), ref(t.ref))
    assert isinstance(t, Choose)
    return Choose(go(t.index), map(go, t.options), ref(t.ref))


def free_axes(term: Term) -> set[Axis]:
    """Return all axes in a term, including bound ones (these are fresh, so no name has two meanings)."""
    found: set[Axis] = set()
    seen: set[Term] = set()
    todo = [term]
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen.add(t)
        if isinstance(t, Axis):
            found.add(t)
        todo.extend(t.children())
    return found


def walk(term: Term) -> Iterator[Term]:
    seen: set[Term] = set()
    todo = [term]
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen.add(t)
        yield t
        if isinstance(t, Composite):
            todo.extend(c for c in t.children() if c is not t.ref)


def flatten(term: Term, kind: type) -> list[Term]:
    """Return the operands of nested sums or products."""
    out, todo = [], [term]
    while todo:
        t = todo.pop()
        if isinstance(t, kind):
            todo.extend(reversed(t.args))  # type: ignore[attr-defined]
        else:
            out.append(t)
    return out


@dataclass(frozen=True)
class Value:
    """A tensor: for each dimension its axes (none if its size is 1), and the term of an element."""

    dims: tuple[tuple[Axis, ...], ...]
    term: Term

    @property
    def axes(self) -> list[Axis]:
        return [a for group in self.dims for a in group]

    def rename(self, mapping: Mapping[Axis, Axis | tuple[Axis, ...]]) -> Value:
        """Replace axes by others: one by one, or one by several of the same total size."""
        if not mapping:
            return self
        dims = tuple(tuple(b for a in group for b in _as_tuple(mapping.get(a, a))) for group in self.dims)
        terms = {a: coordinate(_as_tuple(b)) for a, b in mapping.items()}
        return Value(dims, substitute(self.term, terms))


def coordinate(axes: tuple[Axis, ...]) -> Term:
    """Return the position along a dimension made of these axes."""
    return Mix(axes, [a.size for a in axes]) if axes else Const(0)


def _as_tuple(x: Any) -> tuple[Axis, ...]:
    return x if isinstance(x, tuple) else (x,)


MOST_PARTS = 100
"""The most parts of a term that are printed. Terms share their parts, so a whole text may be exponentially
long."""


def described(term: Any) -> str:
    """Print a term, or several, for the user: `:` is a coordinate, and `called` names a node."""
    return _Description().text(term)


words.register(Term, described)
words.register(tuple, described)


class _Description:
    def __init__(self) -> None:
        self._parts = 0

    def _texts(self, terms: Iterable[Any], inside: bool = False) -> list[str]:
        found = []
        for term in terms:
            found.append(self.text(term, inside))
            if self._parts > MOST_PARTS:
                break
        return found

    def text(self, term: Any, inside: bool = False) -> str:
        """Print one term. inside: the term stands in an index."""
        self._parts += 1
        if self._parts > MOST_PARTS:
            return "..."
        if isinstance(term, tuple):
            return ", ".join(self._texts(term)) or "nothing"
        if isinstance(term, Axis) and term.name.isalpha() and not inside:  # gate, up
            return term.name
        if isinstance(term, (Axis, Mix, Affine)):
            return ":" if inside else "a position"
        if isinstance(term, Const):
            return "memory that nobody wrote" if term.value is None else str(term.value)
        if isinstance(term, Ref):
            index = self._texts(term.index, inside=True)
            whole = all(i == ":" for i in index)
            return called(term.node) + ("" if whole else f"[{', '.join(index)}]")
        if isinstance(term, Apply):
            name = getattr(term.op, "overloadpacket", term.op).__name__
            return f"{name}({', '.join(self._texts(term.args))})"
        if isinstance(term, Mul):
            return " * ".join(self._texts(term.args))
        if isinstance(term, Add):
            return f"({' + '.join(self._texts(term.args))})"
        if isinstance(term, OverAxes):
            return f"{term.word}({self.text(term.body)})"
        return f"one of {', '.join(self._texts(term.options))}" if isinstance(term, Choose) else str(term)
