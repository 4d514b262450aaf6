"""A block whose products are of rows sorted by expert: where one operator is better than its two.

Two `fp4::grouped_mm` are as good as two `fp4::indexed_mm`, and rows that others read must be there anyway. So
such a block is one `fp4::moe`, or it stays two products.
"""

from __future__ import annotations

from torch import fx

from ..graph.nodes import ASSERTIONS, is_op
from ..index.terms import free_axes
from ..refusal import Kind, need
from .mixture import Mixture

SORTED = "rows sorted by expert (grouped_mm)"
GATHERED = "weights gathered for each row (batched_mm)"


def need_one_operator(m: Mixture, down: fx.Node) -> None:
    """A Refusal unless `m`, which ends in the product `down`, is one operator that leaves nothing behind."""
    act, root = m.common.act, m.root
    _need_only_users(down, root)
    need(set(m.tokens) <= free_axes(m.common.x), Kind.NOT_OVER_CHOICES, root)
    need(bool(act.name) and m.common.gain is None, Kind.ACTIVATION, down, act)


def _need_only_users(down: fx.Node, root: fx.Node) -> None:
    """Prove that nothing else reads the nodes between the product and the block's output."""
    before, todo = {root}, [root]
    while todo:
        new = {n for n in todo.pop().all_input_nodes if down < n} - before
        before |= new
        todo += new
    seen, todo = {down}, [down]
    while todo:
        node = todo.pop()
        if node is root:
            continue
        users = [n for n in node.users if not is_op(n, *ASSERTIONS)]
        need(before.issuperset(users), Kind.READ_OUTSIDE, node, node)
        todo += [n for n in users if n not in seen]
        seen.update(users)
