"""Finds masks that have no True element if another mask has none."""

from __future__ import annotations

from torch import Tensor, fx

from ..graph.traced_nodes import SAME_ELEMENTS, called, example, since, writes_to
from ..refusal import Kind, refuse

_PARTS = (*SAME_ELEMENTS, "bool", "any", "unsqueeze", "expand", "detach", "unbind")
_BOTH = ("and_", "__and__", "logical_and", "bitwise_and")


def is_empty_with(node: fx.Node, masks: set[fx.Node]) -> bool:
    """Return whether `node` has no True element if none of `masks` has one."""
    if called(node) in _BOTH:
        return isinstance(example(node), Tensor) and not masks.isdisjoint(node.all_input_nodes)
    return called(node) in _PARTS and bool(node.args) and node.args[0] in masks


def empty_with(mask: fx.Node) -> set[fx.Node]:
    """Return the masks without a True element if `mask` has none: its sources, and masks made from these."""
    chain = [mask]
    while called(chain[-1]) in (*SAME_ELEMENTS, "bool", "any", "unsqueeze") and isinstance(
        chain[-1].args[0], fx.Node
    ):
        chain.append(chain[-1].args[0])
    if len(chain) == 1 or writes_to(chain, since(chain[-1])):
        return {mask}
    found = set(chain)
    for node in since(chain[-1]):
        if node not in found and is_empty_with(node, found) and not writes_to([node], since(node)):
            found.add(node)
    return found


def selects_by(node: fx.Node, masks: set[fx.Node]) -> bool:
    """Return whether `node` chooses exactly the elements where one of `masks` is True."""
    if called(node) in ("where", "nonzero"):
        return len(node.args) == 1 and node.args[0] in masks
    if called(node) != "getitem":
        return False
    index = node.args[1]
    tensors = [i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, fx.Node)]
    if masks.isdisjoint(tensors):
        return False
    if len(tensors) > 1:
        refuse(Kind.SEVERAL_INDICES, None)
    return True
