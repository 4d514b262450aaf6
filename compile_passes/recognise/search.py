"""Finds mixtures of experts in a graph, and for each of them the node that computes the whole mixture."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...meta.torch_internals import TracingContext
from ..graph.nodes import (
    ASSERTIONS,
    BY_SIZE,
    FLOATING,
    PRODUCTS,
    after,
    aten,
    behind,
    has_chosen_rows,
    is_grouped_mm,
    is_op,
    is_pointwise,
    is_product,
    is_tensor,
    item,
    operand,
    reached,
    several,
    shape,
    value,
)
from ..index.reader import READERS, Reader
from ..index.terms import Apply, Const, Ref, free_axes, is_eq, substitute, walk
from ..refusal import Kind, Refusal, Refused, need
from .mixture import Linear, Matcher, Mixture
from .pieces import demote
from .unread import changed_products, first_rows, kind_of, kind_on_output, unread_experts, unread_rows

_STEPS_AFTER = 24
"""A block must end within this many nodes after the last expert: scaling, a view, the sum over choices."""
_MANY = 4
"""This many FFNs of one shape side by side count as experts."""


class _Weight(NamedTuple):
    """Identifies the matrix of a product by a parameter and the numbers that index it, even if only a part of
    it is used."""

    parameter: fx.Node
    places: tuple[int | None, ...]


@dataclass(frozen=True)
class _Down:
    """A down product, and the products that its input is computed from."""

    own: Linear
    ups: list[Linear]


class _Attempt(NamedTuple):
    """The reason why a node does not compute a whole block. The greatest attempt has the best explanation."""

    says_something: bool
    experts: int
    """The number of experts found."""
    others: int
    """Minus the number of outputs in the node that do not belong to the block."""
    refusal: Refusal


class Search:
    """Finds mixtures in topological order. A block that was found is opaque to later ones."""

    def __init__(self, graph: fx.Graph, reader: Reader, written: dict[fx.Node, fx.Node]) -> None:
        """written: products whose weights the graph has written to before."""
        self._written = written
        self.graph, self.reader, self.matcher = graph, reader, Matcher(reader)
        self._nodes = list(graph.nodes)
        self._given = _lists_given()
        self._downs: list[fx.Node] = []
        self._earlier: list[int] = []
        """For each down product, the down products that it is computed from, as bits."""
        self._made: dict[fx.Node, _Down] = {}
        """Each product that may be a down product, as it was read before any block was found."""
        self._near: dict[fx.Node, int] = {}
        """Bit d: down product d reaches the node through operators that a block may end with."""
        for node in _tokens_that_a_mask_chose(graph):
            reader.cut(node)

    def run(self) -> Iterator[tuple[list[fx.Node], Mixture | Refusal]]:
        """Yield (down products, the mixture or the refusal)."""
        cause: Refusal | None = None
        for downs, found in self._all():
            if isinstance(found, Refusal) and found.kind in VAGUE and any(map(has_chosen_rows, downs)):
                known, cause = cause, cause or changed_products(self.graph, self.reader.is_weight)
                if cause is not None:
                    if known is None:  # each result is reported once
                        yield downs, cause
                    continue
            yield downs, found

    def _all(self) -> Iterator[tuple[list[fx.Node], Mixture | Refusal]]:
        single = deep = 0
        told = False
        for bits in self._groups():
            for part, found in self._found(bits):
                if found is not None:
                    told = True
                    yield self._of(part), found
                elif part.bit_count() == 1 and self._is_third(*self._of(part)):
                    deep |= part
                elif part.bit_count() == 1 and has_chosen_rows(*self._of(part)):
                    single |= part
        layers = self._of(deep)
        if len(layers) >= _MANY or (len(layers) > 1 and all(map(has_chosen_rows, layers))):
            yield layers, Refusal(Kind.THREE_LAYERS, layers[-1], (len(layers),))
        if single.bit_count() > 1:
            downs = self._of(single)
            yield downs, Refusal(Kind.READ_COMPUTED, downs[-1], (len(downs),))
        unread = self._unread()
        if unread is None and not (told or layers or single):
            unread = unread_experts(self.graph, self.reader.is_weight, _MANY)
        if unread is not None:
            yield [unread.site], unread

    def _found(self, bits: int) -> list[tuple[int, Mixture | Refusal | None]]:
        """Match these down products as one block or as several, and return the results."""
        self.matcher.most = []
        whole = self._match(bits)
        if not isinstance(whole, Mixture):
            routed = self._by_routing(bits)
            # A shared expert of the same shape stands beside experts that are one product each.
            alone = [1 << d for d, n in enumerate(self._downs) if bits >> d & 1 and self._is_indexed(n)]
            apart = [(bit, self._match(bit)) for bit in alone if bit != bits]
            if any(isinstance(found, Mixture) for _, found in apart):
                return [(bit, self._opaque(found)) for bit, found in apart]
            parts = [each for part in self._parts(bits) for each in self._found(part)]
            if any(found is not None for _, found in parts):
                return parts
            slices = self._by_buffer(bits)
            if slices is not None:
                return slices
            in_turn = [(part, self._opaque(self._match(part), in_turn=True)) for part in routed]
            if any(isinstance(found, Mixture) for _, found in in_turn):
                return in_turn
            if in_turn and isinstance(whole, Refusal):
                whole = Refusal(Kind.IN_TURNS, whole.node, (len(in_turn),))
        return [(bits, self._opaque(whole))]

    def _opaque(self, found: Mixture | Refusal | None, in_turn: bool = False) -> Mixture | Refusal | None:
        """Make a block that was found opaque: later blocks must not read into it.

        in_turn: later blocks add to its output, so nodes after it are read again.
        """
        if isinstance(found, Mixture):
            self.reader.cut(found.root)
            if in_turn:
                self.reader.forget(after(*found.root.users))
        return found

    def _by_routing(self, bits: int) -> list[int]:
        """Return blocks that are added to one tensor, in order: down products with the same routing and
        weights.

        The list is empty if all of them are one block, or if a block would have only one expert.
        """
        at: dict[_Weight, int] = {}
        for d, n in enumerate(self._downs):
            if bits >> d & 1:
                weight = _weight(self._made[n].own.weight)
                at[weight] = at.get(weight, 0) | 1 << d
        groups: dict[object, int] = {}
        for b in self.matcher.most:
            own = at.get(_weight(b.down.ref), 0)
            if b.place is not None:
                return []
            alike = (b.ids, b.masked, None if b.ids or b.masked else b.factors)
            groups[alike] = groups.get(alike, 0) | own
        parts = sorted(groups.values(), key=lambda part: part & -part)
        whole = 0
        for part in parts:
            if part.bit_count() < 2 or whole & part:
                return []
            whole |= part
        return parts if len(parts) > 1 and whole == bits else []

    def _by_buffer(self, bits: int) -> list[tuple[int, Mixture | Refusal | None]] | None:
        """Match experts that read the slices of a buffer apart from products of one shape that read other
        rows, such as a dense FFN beside them. None if there are none.

        All slices of a buffer have their experts, so none of the others can be one of them.
        """
        groups: dict[frozenset[fx.Node], int] = {}
        for d, n in enumerate(self._downs):
            if bits >> d & 1:
                rows = frozenset(r for up in self._made[n].ups for r in _rows_of(up))
                groups[rows] = groups.get(rows, 0) | 1 << d
        if len(groups) < 2:
            return None
        found = [(part, self._match(part) if part.bit_count() > 1 else None) for part in groups.values()]
        if not any(isinstance(m, Mixture) and m.common.place is not None for _, m in found):
            return None
        return [(part, self._opaque(m)) for part, m in found]

    def _parts(self, bits: int) -> list[int]:
        """Return blocks of one shape side by side: down products whose outputs are summed among themselves
        first.

        Within a block, outputs are added one after another or all at once. Where several sums are combined,
        each sum may be a block of its own. So may sums that are never combined.
        """
        parts: dict[int, None] = {}
        masks = dict.fromkeys(near & bits for near in self._near.values())
        for node in self.graph.nodes:
            entering = {self._near.get(n, 0) & bits for n in node.all_input_nodes}
            sums = [m for m in entering if m.bit_count() > 1 and m != self._near[node] & bits]
            if len(sums) > 1 and self._near[node]:
                parts.update(dict.fromkeys(sums))
        if bits not in masks:
            parts.update(dict.fromkeys(m for m in masks if m.bit_count() > 1))
        return [m for m in parts if m != bits and not any(m != o and m & o == m for o in parts)]

    def _unread(self) -> Refusal | None:
        """Return a refusal if many products have rows of their own, chosen by masks, but none of them is a
        down product."""
        rows = [n for n in self.graph.nodes if is_op(n, *PRODUCTS) and has_chosen_rows(n)]
        choices = len({frozenset(free_unbacked_symbols(value(n))) for n in rows})
        if self._downs or choices < _MANY:
            return None
        dtype = value(rows[-1]).dtype
        if dtype not in FLOATING:
            return Refusal(Kind.EXPERTS_DTYPE, rows[-1], (dtype,))
        changed = changed_products(self.graph, self.reader.is_weight)
        return changed or unread_rows(self.graph, self.reader, choices)

    def _of(self, bits: int) -> list[fx.Node]:
        return [n for d, n in enumerate(self._downs) if bits >> d & 1]

    def _groups(self) -> list[int]:
        """Return groups of down products that may be one block: same shape, and inputs that depend on the
        same earlier products."""
        downs = self._downs
        before: dict[fx.Node, int] = {}
        groups: dict[tuple[object, ...], int] = {}
        keys = self._keys()
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            earlier = 0
            for n in inputs:
                earlier |= before.get(n, 0)
            before[node] = earlier
            near = 0
            if self._continues(node) and not is_op(node, *BY_SIZE):
                for n in inputs:
                    near |= self._near.get(n, 0)
            key = keys.get(node)
            if key is not None:
                bit = 1 << len(downs)
                downs.append(node)
                self._earlier.append(earlier)
                before[node], near = earlier | bit, bit
                groups[(*key, earlier)] = groups.get((*key, earlier), 0) | bit
            self._near[node] = near
        return list(groups.values())

    def _keys(self) -> dict[fx.Node, tuple[object, ...]]:
        """Return, for each down product, the properties that the down products of a block share."""
        made_of = self._made
        for node in self.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            self.reader.value(node, 2)  # reading the value also notes which products continue others
        for node in self.graph.nodes:
            if node not in self.reader.continued and is_product(node):
                term = self.reader.value(node, 2).term
                apart = self.matcher.apart(term)
                term = term if apart is None else apart.down
                lin = self.matcher.linear(term) if self.matcher.is_down(term) else None
                if lin is not None:
                    made_of[node] = _Down(lin, self._ups(lin))
        # If a Linear comes before the experts, their gate/up products look like down products, too. But all
        # experts read that Linear.
        readers: dict[_Weight, set[_Weight]] = {}
        for down in made_of.values():
            for up in down.ups:
                readers.setdefault(_weight(up.weight), set()).add(_weight(down.own.weight))

        def is_before(down: _Down) -> bool:
            """Return whether a product comes before the experts and is read by them."""
            indexed = _is_indexed(down.own)
            return _weight(down.own.weight) in readers and all(
                len(readers[_weight(up.weight)]) > 1 or (indexed and not _is_indexed(up)) for up in down.ups
            )

        # A shared expert may have the same shape. Its rows are all tokens, not rows that a mask or `where`
        # chose.
        return {
            node: (str(shape(node)[-1]), str(down.own.inner.size), has_chosen_rows(node))
            for node, down in made_of.items()
            if not is_before(down)
        }

    def _ups(self, down: Linear) -> list[Linear]:
        """Return the products that the input of a down product is computed from."""
        ups = map(self.matcher.linear, self.matcher.leaves(down.input))
        return [up for up in ups if up is not None]

    def _continues(self, node: fx.Node) -> bool:
        if not is_tensor(node):
            return False
        target = getattr(node.target, "overloadpacket", None)
        return target in READERS or is_pointwise(node)

    def _match(self, bits: int) -> Mixture | Refusal | None:
        """Return the mixture of these down products. If several nodes qualify, take the last. None if they
        are not experts."""
        ends = self._ends(bits)
        count = bits.bit_count()
        attempts: list[_Attempt] = []
        changed: Mixture | None = None
        for allow_rest in (False, True):
            for node in reversed(ends):
                if self._near[node] != bits and not allow_rest:
                    continue  # the node also contains experts of another block
                try:
                    found = self.matcher.match(node, allow_rest, lambda n: bool(self._near.get(n, 0) & bits))
                    self._note_form(found, bits)
                    need(found.downs == count, Kind.SOME_EXPERTS, node, found.downs, count)
                    known = found.downs == 1 or all(n < found.downs for n in self._given.values())
                    need(known, Kind.GIVEN_NUMBERS, node, found.downs)
                    if not _is_function_of_block(found):
                        return found
                    changed = changed or found
                except Refused as why:
                    others = (self._near[node] & ~bits).bit_count()
                    own = self.matcher.branches if not others else 0
                    attempts.append(_Attempt(why.refusal.kind not in DULL, own, -others, why.refusal))
        if changed is not None:
            return changed
        routed = count > 1 and all(map(has_chosen_rows, self._of(bits)))
        experts = routed or count >= _MANY or any(attempt.experts > 1 for attempt in attempts)
        if not ends:
            return self._stopped(bits) if experts else None
        if not (experts or self._is_indexed(ends[0])):
            return None  # a dense FFN
        unread = self._not_read(bits)
        if unread is not None:
            return unread
        refusal = max(attempts, key=lambda attempt: attempt[:3]).refusal
        if refusal.kind not in _OPAQUE:
            return refusal
        step = refusal.site
        return (
            self._of_written(step)
            or self._stopped(bits)
            or self._put_over(step)
            or self._by_other_masks(step)
            or first_rows(self._entering(step))
            or self._behind(step)
            or self._first_unread(step, bits)
            or refusal
        )

    def _ends(self, bits: int) -> list[fx.Node]:
        """Return the nodes with which a block of these down products may end. Nodes of later blocks are not
        among them."""
        later = sum(1 << d for d, earlier in enumerate(self._earlier) if earlier & bits)
        last = self._downs[bits.bit_length() - 1]
        from_last = itertools.dropwhile(lambda n: n is not last, self._nodes)
        near = ((n, self._near[n]) for n in from_last)
        whole = (n for n, own in near if own & bits == bits and not own & later)
        return list(itertools.islice(whole, _STEPS_AFTER))

    def _note_form(self, found: Mixture, bits: int) -> None:
        """Note the kind of a block's products. With sorted rows it must become one operator."""
        downs = self._of(bits)
        if all(is_grouped_mm(down) for down in downs):
            found.form, found.wraps, found.at = SORTED, False, downs[0]
            for down in downs:
                need_one_operator(found, down)
        elif found.wraps and len(downs) == 1 and is_op(downs[0], aten.bmm):
            found.form, found.at = GATHERED, downs[0]

    def _not_read(self, bits: int) -> Refusal | None:
        """Return the first reason why a result of these products could not be read."""
        read = self.reader.refusals
        return next((read[n] for n in self.graph.nodes if n in read and self._near[n] & bits), None)

    def _of_written(self, step: fx.Node) -> Refusal | None:
        """Return a refusal if a product that `step` depends on has a weight that the graph has written to
        before."""
        for node in self._entering(step):
            if node in self._written:
                return Refusal(Kind.WRITTEN, node, (self._written[node],))
        return None

    def _by_other_masks(self, step: fx.Node) -> Refusal | None:
        """Return a refusal if rows of experts in `step` were written by a mask that is not computed from ids,
        such as a mask of image tokens."""
        for node in self._entering(step):
            if not is_op(node, aten.index_put) or not self._near.get(operand(node, 2), 0):
                continue
            mask = several(node, 1)[0]
            while is_op(mask, aten.select, aten.squeeze, aten.view, aten.unbind) or item(mask) is not None:
                mask = operand(mask)
            mask = operand(mask) if is_op(mask, aten.nonzero) else mask
            if not is_tensor(mask) or value(mask).dtype != torch.bool:
                continue
            if not any(map(is_eq, walk(self.reader.value(mask, 0).term))):
                return Refusal(Kind.OTHER_MASK, node, (mask,))
        return None

    def _stopped(self, bits: int) -> Refusal | None:
        """Return a refusal for an operator on a single expert's output with which no block can end."""
        for node in self.graph.nodes:
            near = 0
            for n in node.all_input_nodes:
                near |= self._near.get(n, 0)
            alone = near and near & bits == near and near & (near - 1) == 0
            computes = isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
            if alone and computes and not self._continues(node):
                return Refusal(Kind.OPAQUE_OUTPUT, node, (node, kind_on_output(node)))
        return None

    def _put_over(self, step: fx.Node) -> Refusal | None:
        """Return a refusal for the first write in `step` where rows of experts overwrite something other than
        zeros."""
        for node in self._entering(step):
            if is_op(node, aten.index_copy):
                base, rows = operand(node), operand(node, 3)
            elif is_op(node, aten.index_put) and not node.kwargs.get("accumulate", (*node.args, False)[3]):
                base, rows = operand(node), operand(node, 2)
            else:
                continue
            if not self._near.get(rows, 0) or self._near.get(base, 0):
                continue
            if not isinstance(self.reader.value(base, 2).term, Const):
                return Refusal(Kind.PUT_OVER, node, (base,))
        return None

    def _entering(self, step: fx.Node) -> list[fx.Node]:
        """Return `step` and all nodes that it depends on, in the graph's order."""
        entering = behind(step)
        return [n for n in self.graph.nodes if n in entering]

    def _behind(self, step: fx.Node) -> Refusal | None:
        """Return a refusal for the first unreadable operator on rows of experts that `step` depends on."""
        for node in self._entering(step):
            if not is_tensor(node) or value(node).dtype not in FLOATING:
                continue
            if has_chosen_rows(node) and self.reader.value(node, 2) is self.reader.opaque(node):
                cause = (item(node) or (node,))[0]
                return Refusal(Kind.OPAQUE_ROWS, cause, (cause, kind_of(cause)))
        return None

    def _first_unread(self, step: fx.Node, bits: int) -> Refusal | None:
        """Return a refusal for the first unreadable operator on these experts' outputs that `step` depends
        on."""
        for node in self._entering(step):
            unread = self._near[node] & bits and is_tensor(node) and node not in self._downs
            if unread and self.reader.value(node, 2) is self.reader.opaque(node):
                return Refusal(Kind.OPAQUE_WITH_EXPERTS, node, (node, kind_of(node)))
        return None

    def _is_third(self, node: fx.Node) -> bool:
        """Return whether the input of a down product is computed from another down product's output."""
        downs = {_weight(self._made[n].own.weight) for n in self._downs}
        return any(_weight(up.weight) in downs for up in self._made[node].ups)

    def _is_indexed(self, node: fx.Node) -> bool:
        """Return whether a product's weight holds several experts."""
        return node in self._made and _is_indexed(self._made[node].own)


def _tokens_that_a_mask_chose(graph: fx.Graph) -> set[fx.Node]:
    """Return rows that a mask chose and for which a router chooses experts, such as text or image tokens.
    Each kind of tokens has a block of its own."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_op(node, aten.topk, aten.argmax, aten.max, aten.sort):
            continue
        scores = operand(node)
        sizes = free_unbacked_symbols(value(scores))
        todo = [scores] if sizes else []
        while todo:
            n = todo.pop()
            if is_op(n, aten.index, aten.index_select) and not free_unbacked_symbols(value(operand(n))):
                found.add(n)
            elif n.op == "call_function":
                own = [i for i in n.all_input_nodes if is_tensor(i)]
                todo += [i for i in own if free_unbacked_symbols(value(i)) == sizes]
    return {n for n in found if value(n).dtype in FLOATING}


def _is_function_of_block(found: Mixture) -> bool:
    """Return whether a block with one choice for each token ends in a function that the graph can compute
    after it."""
    return found.downs == 1 and found.k == 1 and isinstance(found.common.after, Apply)


def _is_indexed(lin: Linear) -> bool:
    return len(free_axes(lin.weight)) > 2


def _rows_of(up: Linear) -> Iterator[fx.Node]:
    """Yield the tensors whose rows a product multiplies."""
    for t in map(demote, up.input):
        yield from (r.node for r in walk(t) if isinstance(r, Ref) and up.inner in free_axes(r))


def _weight(weight: Ref) -> _Weight:
    index = weight.index
    if len(index) == 1:  # one dimension holds both dimensions of the matrix: take its start
        index = tuple(substitute(i, dict.fromkeys(free_axes(i), Const(0))) for i in index)
    return _Weight(weight.node, tuple(i.value if isinstance(i, Const) else None for i in index))


DULL = (Kind.ONE_EXPERT, Kind.SOMETHING_ADDED)
"""Reasons that hold for any node inside a block, so they explain nothing."""
_OPAQUE = (Kind.OPAQUE, Kind.OPAQUE_WITH_EXPERTS)
"""Reasons that an earlier node may explain better."""
VAGUE = (*_OPAQUE, Kind.OPAQUE_OUTPUT, Kind.OPAQUE_ROWS, Kind.READ_AS_NONE, Kind.READ_COMPUTED)
"""Reasons that say what could not be read, not why."""


def _lists_given() -> dict[str, int]:
    """Return the lists of numbers that the compiled function was given, and how many numbers of each it read.

    If `counts.tolist()` breaks the graph, the rest of the function is compiled for the numbers of this call.
    Slices that have equal lengths by chance, or a list of hit experts that happens to be 0 to n, would then
    look like a block. In the next call they would not. The use of 4 bits would depend on the data.
    """
    context: Any = TracingContext.try_get()
    if context is None:
        return {}
    found: Counter[str] = Counter()
    for guard in context.guards_context.dynamo_guards:
        source = guard.originating_source
        base: Any = getattr(source, "base", None)
        constant = guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH")
        if constant and type(source).__name__ == "GetItemSource" and type(base).__name__ == "LocalSource":
            found[base.local_name] += 1
    return {name: n for name, n in found.items() if n > 1}


SORTED = "rows sorted by expert (grouped_mm)"
GATHERED = "weights gathered for each row (batched_mm)"


def need_one_operator(m: Mixture, down: fx.Node) -> None:
    """Refuse `m`, which ends in the product `down`, unless one operator can replace all of it.

    Two `fp4::grouped_mm` are as fast as two `fp4::indexed_mm`. If something outside the block reads the rows,
    they must be computed anyway. A block of sorted rows therefore becomes one `fp4::moe`, or it stays two
    products.
    """
    act, root = m.common.act, m.root
    _need_only_users(down, root)
    need(set(m.tokens) <= free_axes(m.common.x), Kind.NOT_OVER_CHOICES, root)
    need(bool(act.name) and m.common.gain is None, Kind.ACTIVATION, down, act)


def _need_only_users(down: fx.Node, root: fx.Node) -> None:
    """Prove that nothing else reads the nodes between the product and the block's output."""
    before = reached([root], lambda node: (n for n in node.all_input_nodes if down < n))
    seen, todo = {down}, [down]
    while todo:
        node = todo.pop()
        if node is root:
            continue
        users = [n for n in node.users if not is_op(n, *ASSERTIONS)]
        need(before.keys() >= set(users), Kind.READ_OUTSIDE, node, node)
        todo += [n for n in users if n not in seen]
        seen.update(users)
