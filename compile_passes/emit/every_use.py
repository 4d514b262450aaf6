"""Rewrites each product of experts by itself, because something outside the block reads their values.

The weights are packed as for the block (gate and up of an expert as one operand), so their 4-bit values are
the same. A product with one expert's matrix becomes `fp4::mm`, one with those of all experts
`fp4::grouped_mm_masked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.nodes import aten, is_op, value
from ..index.reader import Reader
from ..recognise.block import Experts, Matrix
from ..recognise.products import factors, read_batched, read_matrix
from ..refusal import Kind, Refusal, need
from ..report import Load, Site, hint
from .batched import multiplied, put_back
from .writer import Packed, Writer, place

FORM = "experts that are no single operator, each product by itself"


@dataclass(frozen=True)
class _Part:
    """The place of a parameter's rows in packed weights: row `start + step r` is row `at + by r` of expert
    `expert`, r < n."""

    operand: int
    expert: int
    start: int
    step: int
    n: int
    at: int
    by: int

    def row(self, r: int) -> int | None:
        own, rest = divmod(r - self.start, self.step)
        return self.at + self.by * own if not rest and 0 <= own < self.n else None


class EveryUse:
    def __init__(self, writer: Writer, parts: Sequence[Experts], root: fx.Node, reader: Reader) -> None:
        """parts: for each operand all experts' matrices, gate and up as one. root: the end of the experts."""
        self.w, self.root, self.reader = writer, root, reader
        self.experts = len(parts[0])
        like = next(iter(parts[0]))[0].ref.node
        for node in {p.ref.node for experts in parts for each in experts for p in each}:
            need(not writer.facts.in_4_bits(node), Kind.PACKED_READ_AGAIN, root)
        self.layout = writer.layout(
            like, *{(p.n, p.k) for experts in parts for each in experts for p in each}
        )
        self.how = writer.activations(like, self.layout)
        sides = [(p.n, p.k) for experts in parts for p in next(iter(experts))]
        self.last, self.sizes = sides[-1][0], ", ".join(f"{n} x {k}" for n, k in dict.fromkeys(sides))
        self.packed: list[Packed] = []
        self.parts: dict[Any, list[_Part]] = {}
        for o, experts in enumerate(map(list, parts)):
            interleaved = len(experts[0]) == 2 and _step(experts[0][0], root) == 2
            self.packed.append(writer.pack(experts, self.layout, root, interleaved=interleaved))
            for e, each in enumerate(experts):
                for i, p in enumerate(each):
                    key, start, step = _rows(p, root)
                    at, by = (i, len(each)) if interleaved else (i * p.n, 1)
                    self.parts.setdefault(key, []).append(_Part(o, e, start, step, p.n, at, by))
        self.made: dict[Any, Any] = {}

    def run(self, why: Refusal, taken: set[fx.Node]) -> list[Site]:
        """Rewrite the products with these weights. Products in `taken` belong to others.

        why: the reason why they are not one operator."""
        ops = []
        for node in list(self.w.gm.graph.nodes):
            if node not in taken and (op := self._rewrite(node)):
                taken.add(node)
                ops.append(op)
        if not ops:
            return []
        load = Load(self.experts, self.experts, hint(value(self.root).numel() // self.last), all_before=True)
        text = f"{len(ops)} products of {self.experts} experts, {self.sizes}"
        return [self.w.site(ops[0], self.root, self.packed, FORM, self.how, text, load, why=why)]

    def _rewrite(self, node: fx.Node) -> str:
        """Rewrite a product, and return the operator that it became, or ""."""
        if is_op(node, aten.mm, aten.addmm) and all(node.kwargs.get(n, 1) == 1 for n in ("alpha", "beta")):
            bias, a, weight = factors(node)
            matrix = read_matrix(weight, self.reader)
            found = self._find([matrix]) if matrix is not None else None
            if found is not None:
                self._replace_one(node, a, bias, found)
                return "fp4::mm"
        batched = read_batched(node, self.reader, self.w.written)
        if batched is None:
            return ""
        found = self._find([each[0] for each in batched.experts])
        if found is None or len(batched.experts) != self.experts:
            return ""
        operand, _, rows = found
        key = (self._number(batched.a), operand, batched.left, batched.shared)
        with self.w.gm.graph.inserting_before(node):
            if key not in self.made:
                self.made[key] = multiplied(self.w, batched, self.packed[operand], self.how)
            out = put_back(self.w, batched, self._cut(self.made[key], 2, rows, operand))
        self.w.replace(node, out)
        return "fp4::grouped_mm_masked"

    def _replace_one(self, node: fx.Node, a: fx.Node, bias: fx.Node | None, found: Any) -> None:
        operand, expert, rows = found
        packed, key, given = self.packed[operand], (self._number(a), operand, expert), (self._number(a), None)
        with self.w.gm.graph.inserting_before(node):
            if key not in self.made:
                if given not in self.made:
                    self.made[given] = self.w.quantised(a, self.how, self.layout)
                weight = self.w.one_expert(packed, expert)
                self.made[key] = self.w.product(
                    "mm", self.made[given], weight, packed.spec, value(node).dtype
                )
            out = self._cut(self.made[key], 1, rows, operand)
            if bias is not None:
                out = self.w.call(aten.add.Tensor, out, bias)
        self.w.replace(node, out)

    def _number(self, node: fx.Node) -> Any:
        return node if node in self.w.written else self.reader.canon.number(node)

    def _cut(self, whole: fx.Node, dim: int, rows: range, operand: int) -> fx.Node:
        if rows == range(self.packed[operand].shape[1]):
            return whole
        return self.w.call(aten.slice.Tensor, whole, dim, rows.start, rows.stop, rows.step)

    def _find(self, matrices: Sequence[Matrix]) -> tuple[int, int, range] | None:
        """Return (operand, expert, rows) of a matrix in the packed weights. For the matrices of all
        experts, those of the first."""
        found: set[tuple[int, range]] = set()
        experts = []
        for matrix in matrices:
            one = self._find_one(matrix)
            if one is None:
                return None
            found.add((one[0], one[2]))
            experts.append(one[1])
        if len(found) != 1 or experts != list(range(experts[0], experts[0] + len(experts))):
            return None
        operand, rows = found.pop()
        return operand, experts[0], rows

    def _find_one(self, matrix: Matrix) -> tuple[int, int, range] | None:
        key, start, step = _rows(matrix, self.root)
        parts, rows = self.parts.get(key, ()), []
        owners = set()
        for r in range(start, start + step * matrix.n, step):
            own = [(p, at) for p in parts if (at := p.row(r)) is not None]
            if not own:
                return None
            owners.add((own[0][0].operand, own[0][0].expert))
            rows.append(own[0][1])
        by = rows[1] - rows[0] if len(rows) > 1 else 1
        whole = range(rows[0], rows[0] + by * len(rows), by) if by > 0 else range(0)
        if len(owners) != 1 or list(whole) != rows:
            return None
        return (*owners.pop(), whole)


def _rows(matrix: Matrix, site: fx.Node) -> tuple[tuple[Any, ...], int, int]:
    """Return (the parameter and the indices that all rows share, first row, step)."""
    at = [place(i, site) for i in matrix.ref.index]
    start, step = next((p[1], p[2]) for p in at if p[0] == "n")
    fixed = tuple(p if p[0] != "n" else ("n",) for p in at)
    return (matrix.ref.node, matrix.k, *fixed), start, step


def _step(matrix: Matrix, site: fx.Node) -> int:
    return _rows(matrix, site)[2]
