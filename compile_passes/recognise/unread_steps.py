"""Classifies a step that is not understood. The kind decides what the advice suggests instead."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ..graph.nodes import PRODUCTS, arguments, aten, is_op, is_tensor, item, passes_order, shape, static_int
from ..operands import operand
from ..refusal import Kind, Refusal, Step

_RANDOM = (aten.native_dropout, aten.bernoulli, aten.rand, aten.randn, aten.rand_like, aten.randn_like)
_ADDS = (aten.index_add, aten.index_put, aten.index_copy, aten.scatter_add)
_SELECTS = (aten.index, aten.index_select, aten.gather)


def is_random(step: fx.Node) -> bool:
    """Return whether a step draws random numbers: dropout in training mode, a noise."""
    return is_op(step, *_RANDOM)


def kind_of(step: fx.Node) -> Step:
    """Return the kind of a step that is not understood."""
    if is_random(step):
        return Step.RANDOM
    if is_op(step, *_ADDS) and _has_token_counts(step.graph):
        return Step.OTHER_TOKENS
    if any(map(_is_chosen_by_experts, step.all_input_nodes)):
        return Step.CHOSEN_BY_EXPERTS
    if is_op(step, aten.index_put) and not step.kwargs.get("accumulate", (*step.args, False)[3]):
        return Step.PUT
    if is_op(step, aten.split, aten.split_with_sizes, aten.cat):
        return Step.CUT
    if is_op(step, *_SELECTS):
        return Step.SELECTED
    if is_op(step, aten.add, aten.sub, aten.mul) and any(is_op(n, *PRODUCTS) for n in step.all_input_nodes):
        return Step.SUM_OF_PRODUCTS
    return Step.OTHER


def kind_on_output(step: fx.Node) -> Step:
    """Return the kind of a step on one expert's output, before all are added."""
    return Step.RANDOM if is_random(step) else Step.ON_OUTPUT


def first_rows(nodes: Iterable[fx.Node]) -> Refusal | None:
    """Return a refusal for a slice of the indices of an expert's rows: how many it drops depends on their
    number."""
    for node in nodes:
        places = node
        while is_op(places, aten.slice, aten.select, aten.squeeze, aten.unbind) or item(places) is not None:
            places = operand(places)
        if is_op(node, aten.slice) and is_op(places, aten.nonzero) and arguments(node).get("dim", 0) == 0:
            return Refusal(Kind.FIRST_ROWS, node)
    return None


def _has_token_counts(graph: fx.Graph) -> bool:
    """Return whether inputs have different symbolic numbers of rows that nothing declares to be equal."""
    inputs = (n for n in graph.find_nodes(op="placeholder") if is_tensor(n) and shape(n))
    return len({str(shape(n)[0]) for n in inputs if static_int(shape(n)[0]) is None}) > 1


def _is_chosen_by_experts(index: fx.Node) -> bool:
    """Return whether these rows are all or some of the indices that `topk` chose."""
    while passes_order(index) or is_op(index, aten.select, aten.slice):
        index = operand(index)
    found = item(index)
    return found is not None and found[1] == 1 and is_op(found[0], aten.topk)
