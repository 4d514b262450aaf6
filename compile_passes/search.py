"""Where in a graph mixtures of experts may be, and which node is the whole of one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from . import changes
from .graph import FLOATING, PRODUCTS, Refusal, is_op, is_tensor, item, need, refuse, shape, value
from .mixture import Matcher, Mixture
from .products import is_grouped_mm
from .reading import Reader
from .steps import instead_of, instead_of_output
from .terms import free_axes

_STEPS_AFTER = 24
"""How many nodes after the last expert's a block may end: scaling, a view, the sum over choices."""
_MANY = 4
"""So many FFNs of one shape, side by side, are experts."""


class Search:
    """Finds mixtures in topological order; what was found is opaque to those after it."""

    def __init__(self, graph: fx.Graph, reader: Reader) -> None:
        self.graph, self.reader, self.matcher = graph, reader, Matcher(reader)
        self._order = {n: i for i, n in enumerate(graph.nodes)}
        self._downs: list[fx.Node] = []
        self._near: dict[fx.Node, int] = {}
        """Bit d: down product d enters the node through operators that a block may end with."""

    def run(self) -> Iterator[tuple[list[fx.Node], Mixture | Refusal]]:
        """(down products, what became of them)."""
        single = 0
        for bits in self._groups():
            results = [(bits, self._match(bits))]
            if not isinstance(results[0][1], Mixture):
                # A shared expert of the same shape beside experts that are one product each.
                alone = [1 << d for d, n in enumerate(self._downs) if bits >> d & 1 and self._is_indexed(n)]
                apart = [(bit, self._match(bit)) for bit in alone if bit != bits]
                if any(isinstance(found, Mixture) for _, found in apart):
                    results = apart
            for part, found in results:
                if found is not None:
                    yield self._of(part), found
                elif part.bit_count() == 1 and _is_of_some_rows(*self._of(part)):
                    single |= part
                if isinstance(found, Mixture):
                    self.reader.cut(found.root)
        if single.bit_count() > 1:
            downs = self._of(single)
            reason = f"{len(downs)} experts read what others have computed, and are none of one block"
            yield downs, Refusal(reason, downs[-1], changes.ONE_AFTER_ANOTHER)
        unread = self._unread()
        if unread is not None:
            yield [unread.node], unread

    def _unread(self) -> Refusal | None:
        """Products of many choices of rows, none of which is a down product."""
        rows = [n for n in self.graph.nodes if is_op(n, *PRODUCTS) and _is_of_some_rows(n)]
        choices = len({frozenset(free_unbacked_symbols(value(n))) for n in rows})
        if self._downs or choices < _MANY:
            return None
        dtype = value(rows[-1]).dtype
        if dtype not in FLOATING:
            reason = f"experts that compute in {dtype}, not float32, bfloat16 or float16"
            return Refusal(reason, rows[-1], changes.DTYPE)
        reason = f"products of {choices} choices of rows are not read as experts"
        return Refusal(reason, rows[-1], changes.FFN)

    def _of(self, bits: int) -> list[fx.Node]:
        return [n for d, n in enumerate(self._downs) if bits >> d & 1]

    def _groups(self) -> list[int]:
        """Down products of one block: of one shape, whose inputs depend on the same earlier ones."""
        downs = self._downs
        before: dict[fx.Node, int] = {}
        groups: dict[tuple[object, ...], int] = {}
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            earlier = 0
            for n in inputs:
                earlier |= before.get(n, 0)
            before[node] = earlier
            near = 0
            if self._continues(node):
                for n in inputs:
                    near |= self._near.get(n, 0)
            key = self._is_down(node)
            if key is not None:
                bit = 1 << len(downs)
                downs.append(node)
                before[node], near = earlier | bit, bit
                groups[(*key, earlier)] = groups.get((*key, earlier), 0) | bit
            self._near[node] = near
        return list(groups.values())

    def _is_down(self, node: fx.Node) -> tuple[object, ...] | None:
        if not (is_op(node, *PRODUCTS) or is_grouped_mm(node)):
            return None
        term = self.reader.value(node, 2).term
        if not self.matcher.is_down(term):
            return None
        lin = self.matcher.linear(term)
        assert lin is not None
        # A shared expert may be of the same shape; it has all rows, not those that a mask or `where` chose.
        return (*(str(s) for s in (shape(node)[-1], lin.inner.size)), _is_of_some_rows(node))

    def _continues(self, node: fx.Node) -> bool:
        if not is_tensor(node):
            return False
        target = getattr(node.target, "overloadpacket", None)
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return target in self.reader.understood or pointwise

    def _match(self, bits: int) -> Mixture | Refusal | None:
        """The furthest node that is a mixture of these down products; None if they are no experts."""
        ends = [n for n in self.graph.nodes if self._near[n] & bits == bits][:_STEPS_AFTER]
        count = bits.bit_count()
        told: list[tuple[bool, int, Refusal]] = []
        for allow_rest in (False, True):
            for node in reversed(ends):
                if self._near[node] != bits and not allow_rest:
                    continue  # another block's experts enter too
                try:
                    found = self.matcher.match(node, allow_rest)
                    for r in found.rest:
                        experts = self._near.get(r.node, 0) & bits
                        if experts:
                            reason = f"{r.node.name} ({r.node.target}) has experts and is not understood"
                            refuse(reason, r.node, instead_of(r.node))
                    need(
                        found.downs == count,
                        f"it is the sum of {found.downs} of {count} experts",
                        node,
                        changes.ALL_TOGETHER,
                    )
                    return found
                except Refusal as refusal:
                    own = self.matcher.branches if self._near[node] == bits else 0
                    told.append((refusal.reason not in _DULL, own, refusal))
        experts = count >= _MANY or any(branches > 1 for _, branches, _ in told)
        if not ends:
            return self._stopped(bits) if experts else None
        if not (experts or self._is_indexed(ends[0])):
            return None  # a dense FFN
        refusal = max(told, key=lambda t: t[:2])[2]
        if not refusal.reason.endswith("is not understood"):
            return refusal
        return self._stopped(bits) or self._behind(refusal.node) or refusal

    def _stopped(self, bits: int) -> Refusal | None:
        """The operator that an expert's output meets before it is added up, if no block ends with such."""
        for node in self.graph.nodes:
            near = 0
            for n in node.all_input_nodes:
                near |= self._near.get(n, 0)
            alone = near and near & bits == near and near & (near - 1) == 0
            computes = isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
            if alone and computes and not self._continues(node):
                reason = f"{node.target} of one expert's output, before all are added, is not understood"
                return Refusal(reason, node, instead_of_output(node))
        return None

    def _behind(self, step: fx.Node) -> Refusal | None:
        """The first step of an expert's rows, of those that enter `step`, that is the reason why."""
        behind, todo = {step}, [step]
        while todo:
            new = set(todo.pop().all_input_nodes) - behind
            behind |= new
            todo += new
        for node in self.graph.nodes:
            if node not in behind or not is_tensor(node) or value(node).dtype not in FLOATING:
                continue
            if _is_of_some_rows(node) and self.reader.value(node, 2) is self.reader.opaque(node):
                cause = (item(node) or (node,))[0]
                reason = f"{cause.name} ({cause.target}) of an expert's rows is not understood"
                return Refusal(reason, cause, instead_of(cause))
        return None

    def _is_indexed(self, node: fx.Node) -> bool:
        """Whether a product's weight holds several experts."""
        lin = self.matcher.linear(self.reader.value(node, 2).term)
        return lin is not None and len(free_axes(lin.weight)) > 2


def _is_of_some_rows(node: fx.Node) -> bool:
    """Whether a tensor has the rows that a mask or `where` chose."""
    return bool(free_unbacked_symbols(value(node)))


_DULL = ("there is only one expert", "something else is added to it")
"""What is wrong with every node that is not the whole of a block."""
