"""A graph break between a router and its experts: ids, weights and rows have different symbols for their
lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import more
from recorder import Recorder, relative_error
from test_batch_and_length import CALLS, DenseLoop, Einsum, FlatInside, Gathered, OneHotLoop, WhereLoop
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def disabled(route: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(route)


def printed(route: Callable[..., Any]) -> Callable[..., Any]:
    def and_printed(x: Tensor) -> Any:
        result = route(x)
        print("", end="")
        return result

    return and_printed


def checked(route: Callable[..., Any]) -> Callable[..., Any]:
    def and_checked(x: Tensor) -> Any:
        result = route(x)
        if result[1].max().item() > 2:
            raise ValueError("a weight above 2")
        return result

    return and_checked


@pytest.mark.parametrize(
    ("style", "broken"),
    [
        (FlatInside, disabled),
        (WhereLoop, printed),
        *(more(style, checked) for style in (OneHotLoop, DenseLoop, Gathered)),
    ],
)
def test_experts_after_a_break(style, broken):
    module, recorder = style(), Recorder(activation="bf16", format="mxfp4")
    twin = module.twin("mxfp4")
    module.route = broken(module.route)
    compiled = torch.compile(module, backend=recorder)
    with torch.no_grad():
        for shape in CALLS["both"]:
            x = torch.randn(*shape, module.H)
            assert relative_error(compiled(x), twin(x)) < 1e-5, (shape, recorder.reasons)
    assert recorder.ops and set(recorder.ops) == {"fp4::moe"}, recorder.reasons


class Beside(WhereLoop):
    """Other rows come in, as many as those of the experts in some calls."""

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x).sum((0, 1)) + others.sum((0, 1))


def test_lengths_that_are_equal_once():
    module, recorder = Beside(), Recorder(activation="bf16", format="mxfp4")
    twin, compiled = module.twin("mxfp4"), torch.compile(module, backend=recorder)
    with torch.no_grad():
        for (b, t), (c, u) in zip([(2, 8), (3, 5), (4, 7), (2, 6)], [(3, 7), (3, 5), (5, 3), (4, 5)]):
            x, others = torch.randn(b, t, module.H), torch.randn(c, u, module.H)
            assert relative_error(compiled(x, others), twin(x, others)) < 1e-5
    assert recorder.compilations == 3 and set(recorder.ops) == {"fp4::moe"}


@pytest.mark.parametrize("style", [Gathered, *map(more, (Einsum, WhereLoop))])
def test_unbacked_sizes(style):
    """`mark_unbacked`: one compilation for all sizes, none of which may be compared with a number."""
    module, recorder = style(), Recorder(activation="bf16", format="mxfp4")
    twin, compiled = module.twin("mxfp4"), torch.compile(module, backend=recorder)
    with torch.no_grad():
        for shape in CALLS["both"]:
            x = torch.randn(*shape, module.H)
            for d in (0, 1):
                torch._dynamo.decorators.mark_unbacked(x, d)
            assert relative_error(compiled(x), twin(x)) < 1e-5, (shape, [f.note for f in recorder.frames])
    assert recorder.compilations == 1 and recorder.ops == ["fp4::moe"], recorder.reasons
