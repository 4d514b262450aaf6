"""Decides whether a block with rows sorted by expert becomes one operator instead of two products.

Two `fp4::grouped_mm` are as good as two `fp4::indexed_mm`. If something else reads the rows, they must be
computed anyway. Such a block therefore becomes one `fp4::moe`, or it stays two products.
"""

from __future__ import annotations

from torch import fx

from ..graph.nodes import ASSERTIONS, is_op
from ..graph.walks import reached
from ..index.terms import free_axes
from ..refusal import Kind, need
from .mixture import Mixture

SORTED = "rows sorted by expert (grouped_mm)"
GATHERED = "weights gathered for each row (batched_mm)"


def need_one_operator(m: Mixture, down: fx.Node) -> None:
    """Refuse `m`, which ends in the product `down`, unless one operator can replace all of it."""
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
