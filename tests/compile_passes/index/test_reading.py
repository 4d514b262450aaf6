"""Terms describe what a graph computes: the tests evaluate each term and compare it with the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_ops.compile_passes.graph.nodes import Canon
from fp4_ops.compile_passes.index.reader import Reader
from fp4_ops.compile_passes.index.terms import (  # fmt: skip
    Add,
    Affine,
    AnyOf,
    Apply,
    Axis,
    Choose,
    Const,
    Mean,
    Mix,
    Mul,
    Ref,
    Sum,
    Term,
    Value,
    described,
    interning,
)

aten = torch.ops.aten


def evaluate(value: Value, nodes: dict[fx.Node, Tensor]) -> Tensor:
    """The tensor that a value describes: its term at every coordinate, one by one."""

    def go(t: Term, at: dict[Term, int]) -> float:
        if isinstance(t, Axis):
            return at[t]
        if isinstance(t, Const):
            return t.value
        if isinstance(t, Mix):
            total = 0
            for part, size in zip(t.parts, t.sizes):
                total = total * size + go(part, at)
            return total
        if isinstance(t, Affine):
            return t.start + t.step * go(t.base, at)
        if isinstance(t, Ref):
            return nodes[t.node][tuple(int(go(i, at)) for i in t.index)].item()
        if isinstance(t, Mul):
            return go(t.args[0], at) * go(t.args[1], at)
        if isinstance(t, Add):
            return sum(go(a, at) for a in t.args)
        if isinstance(t, (Sum, AnyOf)):
            every = [go(t.body, {**at, **point}) for point in points(list(t.axes))]
            return sum(every) if isinstance(t, Sum) else float(any(every))
        if isinstance(t, Mean):
            every = [go(t.body, {**at, **point}) for point in points(list(t.axes))]
            return sum(every) / len(every) if every else float("nan")
        if isinstance(t, Choose):
            return go(t.options[int(go(t.index, at))], at)
        assert isinstance(t, Apply)
        args = [torch.tensor(go(a, at), dtype=torch.float64) if isinstance(a, Term) else a for a in t.args]
        return float(t.op(*args, **t.kwargs))

    def points(axes: list[Axis]) -> list[dict[Term, int]]:
        found: list[dict[Term, int]] = [{}]
        for a in axes:
            found = [{**p, a: i} for p in found for i in range(a.size)]
        return found

    out = [go(value.term, p) for p in points(value.axes)]
    sizes = [int(torch.tensor([a.size for a in group]).prod()) for group in value.dims]
    return torch.tensor(out, dtype=torch.float64).view(sizes)


def check(f: Callable[..., Tensor], *inputs: Tensor, level: int = 2) -> Value:
    """The value of f's output, after it was compared with f's output. It must be read, not opaque."""
    traced = make_fx(f, tracing_mode="fake", decomposition_table={})(*inputs)
    seen: dict[fx.Node, Tensor] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node):
            seen[n] = out = super().run_node(n)
            return out

    want = Keep(traced).run(*inputs)
    output = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    with interning():
        reader = Reader(traced.graph, Canon(traced.graph), lambda n: n.op == "placeholder" and "w" in n.name)
        value = reader.value(output, level)
        assert not (isinstance(value.term, Ref) and value.term.node is output), "not read"
        assert [tuple(a.size for a in g) for g in value.dims]
        got = evaluate(value, seen)
    torch.testing.assert_close(got, want.double().view(got.shape), rtol=1e-4, atol=1e-5)
    return value


X, IDS = torch.randn(4, 6), torch.randint(0, 3, (4, 2))
CASES: dict[str, Callable[[], tuple]] = {
    "views": lambda: (lambda x: x.view(2, 2, 3, 2).permute(3, 0, 2, 1).reshape(4, 6), X),
    "repeat": lambda: (lambda x: x.repeat(3, 1).view(3, 4, 6), X),
    "slices": lambda: (lambda x: x[:, 1::2] + x[:, :3], X),
    "select": lambda: (lambda x: x[2] * x[-1], X),
    "transposed sum": lambda: (lambda x: x[:, :4] + x[:, :4].t(), X),
    "matrix times itself": lambda: (lambda x: x @ x.t(), X),
    "one-hot rows of itself": lambda: (
        lambda i: (i.unsqueeze(1) == torch.arange(4))[torch.arange(4)] * 1.0, IDS[:, 0],
    ),
    "gather by ids": lambda: (lambda x, i: x[i] * 2.0, X, IDS),
    "gather along rows": lambda: (lambda x, i: torch.gather(x, 1, i) + 1.0, X, IDS),
    "index pairs": lambda: (lambda x, i: x[i[:, 0], i[:, 1]] * 1.0, X, IDS),
    "contraction": lambda: (lambda x, i: torch.einsum("th,uh->tu", x, x * 2.0), X, IDS),
    "batched contraction": lambda: (
        lambda x: torch.einsum("tah,tbh->tab", x.view(4, 2, 3), x.view(4, 2, 3)), X,
    ),
    "weighted one-hot": lambda: (
        lambda x, i: ((i.unsqueeze(-1) == torch.arange(3)) * x[:, :2].unsqueeze(-1)).sum(1), X, IDS,
    ),
    "any": lambda: (lambda i: (i == 1).any(-1) * 1.0, IDS),
    "stack": lambda: (lambda x: (torch.stack([x, x * 2, x + 1], 1) * x[:, :3].unsqueeze(-1)).sum(1), X),
    "sorted and put back": lambda: (
        lambda x, i: torch.zeros_like(x).index_copy(
            0, i.argsort(stable=True), x[i.argsort(stable=True)] * 3.0
        ),
        X, IDS[:, 0],
    ),
    "summed by token": lambda: (
        lambda x, i: torch.zeros_like(x).index_add(
            0, i.view(-1).argsort(stable=True) // 2, x[i.view(-1).argsort(stable=True) // 2] * 1.5
        ),
        X, IDS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_terms_compute_what_the_graph_does(name):
    f, *inputs = CASES[name]()
    check(f, *inputs)


def test_a_term_of_shared_parts_is_told_in_short():
    """Its whole text would have 2**60 parts."""
    with interning():
        term = Axis(3, "token")
        for _ in range(60):
            term = Apply(aten.atan2.default, (term, term))
        text = described(Mul(term, Const(2)))
    assert text.startswith("atan2(atan2(") and text.endswith(")") and "..." in text and len(text) < 2000
